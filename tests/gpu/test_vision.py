"""Rows with images on compiled kernels: near transformers' own forward in bfloat16, and the same bits under graphs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from PIL import Image

from ftcli.data.collate import unpadded_batch, with_images
from ftcli.data.pixels import PixelReader
from ftcli.data.tokens import TokenizedRow
from ftcli.data.vision import Vision
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import decoder_layers
from ftcli.model.cuda_graphs import GraphRunner
from ftcli.model.fused import DecoderStack, stack_of
from ftcli.model.loss import forward_loss
from ftcli.model.patch import patch
from ftcli.rows.row import ImageSource, Row
from ftcli.tables.images import TABLE
from tests.vision import encoded, processor_of

pytestmark = pytest.mark.gpu

IMAGE = 1999
TEXT: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "patch_size": 14}
OF_QWEN = {"depth": 4, "num_heads": 2, "out_hidden_size": 512, "num_position_embeddings": 64, **VISION}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}},
        {**OF_QWEN, "deepstack_visual_indexes": [0, 1, 2]},
        {},
    ),
    "gemma3": (
        {**TEXT, "sliding_window": 48, "query_pre_attn_scalar": 128},
        {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 112, **VISION},
        {"mm_tokens_per_image": 64},
    ),
}


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


def built(name: str, *, tower: bool) -> tuple[Any, Vision]:
    text, vision, beside = CONFIGS[name]
    config = transformers.AutoConfig.for_model(
        name, text_config=text, vision_config=vision, image_token_id=IMAGE, tie_word_embeddings=False, **beside
    )
    config.image_token_id = IMAGE
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
    targets = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    if tower:
        targets += r"|.*visual\.blocks.*\.(qkv|proj)|.*vision_tower.*(layers).*\.(q|k|v|out)_proj"
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets, init_lora_weights=False))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    values = config.to_dict()
    return model.train(), Vision(TABLE[name], processor_of(name, values), IMAGE, (), values)


def row(vision: Vision, number: int, *sides: int) -> TokenizedRow:
    """Images with text between them, 256 tokens in all."""
    chance = np.random.default_rng(number)
    origin, ids, images = Row("rows", number, {}), list[int](), []
    for side in sides:
        ids += [*chance.integers(0, 1900, 5).tolist(), IMAGE]
        pixels = Image.fromarray(chance.integers(0, 255, (side, side, 3), dtype=np.uint8))
        images.append(vision.looked_at(ImageSource(content=encoded(pixels)), origin))
    more = sum(len(vision.ids_of(image)) - 1 for image in images)
    ids += chance.integers(0, 1900, 256 - more - len(ids)).tolist()
    return vision.expanded(TokenizedRow(origin, ids, [*[IGNORE_INDEX] * (len(ids) - 20), *ids[-20:]]), images)


def batches(vision: Vision) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of one shape: with images, without, with others."""
    reader = PixelReader(vision, torch.bfloat16)
    groups = [
        [row(vision, 1, 60, 90), row(vision, 2, 40)],
        [row(vision, 3), row(vision, 4)],
        [row(vision, 5), row(vision, 6, 100)],
        [row(vision, 7), row(vision, 8)],
        [row(vision, 9, 56), row(vision, 10, 56, 70)],
    ]
    made = [with_images(unpadded_batch(rows, 0), [rows], reader) for rows in groups]
    return [{name: value.cuda() for name, value in each.items() if name != "lengths"} for each in made]


def losses_and_gradients(model: Any, given: list[dict[str, torch.Tensor]], stack: Any) -> list[list[torch.Tensor]]:
    found = []
    for batch in given:
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward_loss(model, batch, num_items=40, stack=stack).loss
        loss.backward()
        found.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("tower", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bits_are_those_without_graphs_and_near_those_of_transformers(name: str, tower: bool) -> None:
    """Also where the tower is trained, whose gradient comes through the graphs."""
    model, vision = built(name, tower=tower)
    given = batches(vision)
    eager = losses_and_gradients(model, [_alone(each) for each in given], None)
    patch(model, "auto")
    stack = stack_of(model, torch.bfloat16)
    assert isinstance(stack, DecoderStack)
    assert len(decoder_layers(model.get_base_model())) == 4
    wanted = losses_and_gradients(model, given, stack)
    reporter: Any = SimpleNamespace(info=print)
    stack.runner = runner = GraphRunner(stack, 1024, reporter)
    found = losses_and_gradients(model, given, stack)
    assert runner.status.stopped is None
    assert runner.status.replays >= 2
    for batch, one, other, reference in zip(given, found, wanted, eager, strict=True):
        # Rows without images or documents are left to cuDNN, whose backward adds up in no fixed order.
        assert "image_places" not in batch or all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for near in (one, other):
            for value, exact in zip(near, reference, strict=True):
                assert float((value.float() - exact.float()).norm()) <= 0.06 * float(exact.float().norm()) + 1e-6


def _alone(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of equal length need no boundaries: transformers sees each as it is."""
    return {name: value for name, value in batch.items() if name != "document_starts"}
