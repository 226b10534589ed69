"""Rows with images give the loss and the gradients of transformers' own forward, alone, padded and packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ftcli.data.collate import PaddingCollator, packed_batch, unpadded_batch, with_images
from ftcli.data.pixels import PixelReader
from ftcli.data.tokens import RowImage, TokenizedRow
from ftcli.data.vision import Vision
from ftcli.labels import IGNORE_INDEX
from ftcli.model.fused import stack_of
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.rows.row import ImageSource, Row
from ftcli.tables.images import TABLE
from tests.small_models import MULTIMODAL, build
from tests.vision import encoded, processor_of

#: Behind a slash: the text config's ``use_bidirectional_attention``.
SEEING = [*sorted(set(TABLE) & set(MULTIMODAL)), "gemma4/vision"]
IMAGE = 259
#: Ids of what ends the rows of an image, where a family has such tokens.
ENDS = (260, 261)


def model_of(model_type: str) -> Any:
    """A small model, all of whose weights count."""
    name, _, both_ways = model_type.partition("/")
    model = build(name)
    if both_ways:
        model.config.text_config.use_bidirectional_attention = both_ways
    model.config.image_token_id = IMAGE
    if model_type == "gemma3":  # narrower than an image
        model.config.text_config.sliding_window = 3
        for layer in model.model.language_model.layers:
            layer.self_attn.sliding_window = layer.self_attn.sliding_window and 3
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return model


def vision_of(model: Any) -> Vision:
    kind = TABLE[model.config.model_type]
    config = model.config.to_dict()
    return Vision(kind, processor_of(model.config.model_type, config), IMAGE, ENDS if kind.ends else (), config)


def row(vision: Vision, number: int, pieces: Sequence[int | tuple[int, int]]) -> TokenizedRow:
    """Text of so many tokens, and images of a width and a height, in turn; the last text bears loss."""
    chance = np.random.default_rng(number)
    ids: list[int] = []
    images: list[RowImage] = []
    origin = Row("rows", number, {})
    for piece in pieces:
        if isinstance(piece, int):
            ids += chance.integers(8, 250, piece).tolist()
        else:
            ids.append(IMAGE)
            pixels = Image.fromarray(chance.integers(0, 255, (piece[1], piece[0], 3), dtype=np.uint8))
            images.append(vision.looked_at(ImageSource(content=encoded(pixels)), origin))
    trained = int(pieces[-1]) - 1  # type: ignore[arg-type]
    labels = [IGNORE_INDEX] * (len(ids) - trained) + ids[-trained:]
    return vision.expanded(TokenizedRow(origin, ids, labels), images)


def rows_of(vision: Vision) -> list[TokenizedRow]:
    """Of unequal lengths; one without an image, one with several, one that begins with one."""
    return [
        row(vision, 1, [3, (60, 60), 5]),
        row(vision, 2, [6]),
        row(vision, 3, [2, (90, 40), 1, (30, 70), 4, (56, 56), 3]),
        row(vision, 4, [(40, 120), 7]),
    ]


def own_inputs(vision: Vision, tokens: TokenizedRow, pixels: PixelReader) -> dict[str, Tensor]:
    """What transformers' processor gives for the row."""
    ids = torch.tensor([tokens.input_ids])
    if not tokens.images:
        return {"input_ids": ids}
    marks = vision.kind.marks
    more = {} if marks is None else {marks: (ids == IMAGE).int()}
    return {"input_ids": ids, **more, **pixels.of([tokens])}


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def wanted(model: Any, vision: Vision, rows: Sequence[TokenizedRow]) -> tuple[float, dict[str, Tensor]]:
    """The sum of all rows' losses by transformers' forward, each alone, and its gradients."""
    total, pixels = 0.0, PixelReader(vision, torch.float32, 1)
    for tokens in rows:
        logits = model(**own_inputs(vision, tokens, pixels), use_cache=False).logits[0, :-1]
        labels = torch.tensor(tokens.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


def close(found: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert set(found) == set(reference)
    for name, gradient in reference.items():
        scale = float(gradient.norm())
        if scale > 1e-6:
            assert float((found[name] - gradient).norm()) / scale < 1e-5, name


def layouts(vision: Vision, rows: list[TokenizedRow]) -> dict[str, dict[str, Tensor]]:
    pixels = PixelReader(vision, torch.float32, 2)
    plain = [{"input_ids": one.input_ids, "labels": one.labels} for one in rows]
    packs = [rows[:2], rows[2:]]
    return {
        "padded": with_images(PaddingCollator(0)(plain), [[one] for one in rows], pixels),  # type: ignore[arg-type]
        "packed": with_images(packed_batch(packs, 0), packs, pixels),
        "unpadded": with_images(unpadded_batch(rows, 0), [rows], pixels),
    }


@pytest.mark.parametrize("trained", ["language", "everything"])
@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("model_type", SEEING)
def test_loss_and_gradients_are_those_of_transformers(model_type: str, kernels: Any, trained: str) -> None:
    model = model_of(model_type)
    vision = vision_of(model)
    rows = rows_of(vision)
    if trained == "language":
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
    loss, gradients = wanted(model, vision, rows)
    applied = patch(model, kernels)
    stack = stack_of(model)
    assert isinstance(stack, str) == (kernels == "off" or "moe" in model_type)  # experts are trained off the kernels
    for layout, batch in layouts(vision, rows).items():
        if isinstance(stack, str) and layout != "padded":
            continue  # documents are told to ftcli's attention alone
        inputs = {name: value for name, value in batch.items() if name != "lengths"}
        for function in (stack, None):
            found = forward_loss(model, inputs, stack=None if isinstance(function, str) else function).loss
            found.backward()
            assert float(found.detach()) == pytest.approx(loss, rel=1e-5), layout
            close(gradients_of(model), gradients)
    applied.undo()
