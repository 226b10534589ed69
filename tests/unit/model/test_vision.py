"""Rows with images give the loss and the gradients of transformers' own forward, alone, padded and packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ftcli.config.model import LoraConfig
from ftcli.data.collate import packed_batch, padded_batch, unpadded_batch, with_images
from ftcli.data.pixels import PixelReader
from ftcli.data.tokens import RowImage, TokenizedRow
from ftcli.data.vision import Vision
from ftcli.errors import FtcliError
from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.decoding import Forward
from ftcli.generation.engine import Engine
from ftcli.generation.requests import GenerationRequest, PromptImages
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.preference.pairs import AnswerScorer
from ftcli.model.fused import stack_of
from ftcli.model.gradient_checkpointing import use_checkpointing
from ftcli.model.lora import apply_lora
from ftcli.model.loss import forward_loss
from ftcli.model.measure import LiveBytes
from ftcli.model.patch import patch
from ftcli.model.vision import attend_in_tower
from ftcli.plan.batches import Batches
from ftcli.plan.measured import Question, measured_tower
from ftcli.plan.precision import DtypePlan
from ftcli.rows.row import ImageSource, Row
from ftcli.tables import code_of
from ftcli.tables.images import TABLE
from ftcli.train.parallel import GradientReducer
from tests.small_models import MULTIMODAL, build
from tests.tiers import further
from tests.vision import encoded, processor_of

#: Behind a slash: the text config's ``use_bidirectional_attention``.
SEEING = [*sorted(set(TABLE) & set(MULTIMODAL)), "gemma4/vision"]
PLAN = DtypePlan("float32", "float32", "float32", False, "")
#: A family with positions of three rows and what is added to layers, and one that sees both ways.
FEW = ("qwen3_vl", "gemma3")
CPU, LONGEST = torch.device("cpu"), 400
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


def adapted(model: Any, *parts: Any) -> Any:
    """The model with adapters on ``parts``, all of whose weights count."""
    found, _ = apply_lora(model, LoraConfig(r=4, alpha=8), PLAN, seed=0, parts=parts)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return found


def test_names_of_targets_are_looked_up_in_every_part() -> None:
    """A part of which nothing is named is refused; what is measured of the tower is what has adapters there."""
    parts = ("language", "vision")
    with pytest.raises(FtcliError, match="no layer of the part vision"):
        apply_lora(model_of("qwen3_vl"), LoraConfig(target_modules=["q_proj"]), PLAN, seed=0, parts=parts)
    lora = LoraConfig(r=4, target_modules=["q_proj", "qkv"])
    model, targets = apply_lora(model_of("qwen3_vl"), lora, PLAN, seed=0, parts=parts)
    assert {name.rpartition(".")[2] for name in targets.modules} == {"q_proj", "qkv"}
    question = Question(
        json.dumps(model_of("qwen3_vl").config.to_dict()), lora.model_dump_json(), False, "sdpa", False, "float32",
        "float32", "float32", False, 0, None, False, False, True, parts,
    )  # fmt: skip
    of_tower = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and "visual" in n)
    assert measured_tower(question).trained.elements == of_tower > 0


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


def wanted(
    model: Any, vision: Vision, rows: Sequence[TokenizedRow], dtype: torch.dtype
) -> tuple[float, dict[str, Tensor]]:
    """The sum of all rows' losses by transformers' forward, each alone, and its gradients."""
    total, pixels = 0.0, PixelReader(vision, dtype, 1)
    model.to(dtype)
    for tokens in rows:
        logits = model(**own_inputs(vision, tokens, pixels), use_cache=False).logits[0, :-1]
        labels = torch.tensor(tokens.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        loss.backward()
        total += float(loss.detach())
    gradients = gradients_of(model)
    model.float()
    return total, gradients


def close(found: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    assert set(found) == set(reference)
    for name, gradient in reference.items():
        scale = float(gradient.norm())
        if scale > 1e-6:
            assert float((found[name] - gradient).norm()) / scale < 1e-5, name


def layouts(vision: Vision, rows: list[TokenizedRow]) -> dict[str, dict[str, Tensor]]:
    pixels = PixelReader(vision, torch.float32, 2)
    packs = [rows[:2], rows[2:]]
    return {
        "padded": with_images(padded_batch(rows, 0), [[one] for one in rows], pixels),
        "packed": with_images(packed_batch(packs, 0), packs, pixels),
        "unpadded": with_images(unpadded_batch(rows, 0), [rows], pixels),
    }


@pytest.mark.parametrize("trained", ["language", "everything", "adapters"])
@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("model_type", SEEING)
def test_loss_and_gradients_are_those_of_transformers(model_type: str, kernels: Any, trained: str) -> None:
    model = model_of(model_type)
    vision = vision_of(model)
    rows = rows_of(vision)
    if trained == "language":
        model.requires_grad_(False)
        model.get_decoder().requires_grad_(True)
    else:
        attend_in_tower(model)
    if trained == "adapters":
        model = adapted(model, "language", "projector", "vision")
    # In float32 some gradients of transformers' own delta nets are 1e-5 off, ours 6e-6, on either side of the true one.
    exact = (model_type, kernels, trained) == ("qwen3_5", "reference", "language")
    loss, gradients = wanted(model, vision, rows, torch.float64 if exact else torch.float32)
    applied = patch(model, kernels)
    stack = stack_of(model)
    assert isinstance(stack, str) == (kernels == "off")
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


@pytest.mark.parametrize("model_type", ["qwen3_vl", *further("qwen2_5_vl", "qwen3_5", "gemma3", "gemma4", "mistral3")])
def test_what_a_trained_tower_keeps_is_what_was_measured(model_type: str) -> None:
    """Of more layers and of larger images than those that were looked at; checkpointed layers give the same bits."""
    base = model_of(model_type)
    raw = base.config.to_dict()
    question = Question(
        json.dumps(raw), '{"r": 4, "alpha": 8}', False, "sdpa", False, "float32", "float32", "float32", False, 0, None,
        False, False, True, ("projector", "vision"),
    )  # fmt: skip
    found = measured_tower(question)
    attend_in_tower(base)
    model = adapted(base, "projector", "vision").train()
    assert found.trained.elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
    vision = vision_of(model)
    rows = [row(vision, n, [2, (84, 84), 3]) for n in (1, 2)]
    kept, gradients = [], []
    for again in (False, False, True):
        given = PixelReader(vision, torch.float32, 1).of(rows[: 1 if not kept else 2])
        if again:
            use_checkpointing(model, "selective")
        live = LiveBytes([*model.parameters(), *model.buffers(), *given.values()])
        with live:
            seen = code_of(TABLE[model_type].tower)(base.model, given)
            kept.append(live.now)
        sum(each.square().sum() for each in (seen.features, *seen.added)).backward()  # type: ignore[union-attr]
        gradients.append(gradients_of(model))
    patches = patches_in(given, base.config.vision_config.patch_size) / 2
    if model_type != "gemma4":  # whose mask of all pairs of patches is larger than what so narrow layers keep
        assert kept[1] - kept[0] == pytest.approx(patches * found.whole.kept, rel=0.15)
    assert kept[2] < kept[1]
    assert all(torch.equal(gradients[1][name], gradients[2][name]) for name in gradients[1])


def patches_in(given: dict[str, Tensor], side: int) -> int:
    pixels = given["pixel_values"]
    if pixels.dim() == 4:
        return int(pixels.shape[0] * pixels.shape[2] * pixels.shape[3] // side**2)
    return int(pixels.shape[:-1].numel())


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5"])
def test_a_frozen_tower_sees_what_transformers_does(model_type: str) -> None:
    """Images of several sizes, some of which follow each other, and frames of one; in float64."""
    model = model_of(model_type).double()
    vision, chance = vision_of(model), torch.Generator().manual_seed(0)
    grids = torch.tensor([[1, 6, 6], [1, 4, 8], [1, 8, 4], [3, 2, 4], [1, 2, 2]])
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    pixels = torch.randn(int(grids.prod(1).sum()), width, dtype=torch.float64, generator=chance)
    given = {"pixel_values": pixels, "image_grid_thw": grids}
    assert vision.kind.frozen is not None
    with torch.no_grad():
        own, ours = (code_of(name)(model.model, given) for name in (vision.kind.tower, vision.kind.frozen))
    assert len(own.added) == len(ours.added)
    for reference, found in zip((own.features, *own.added), (ours.features, *ours.added), strict=True):
        assert float((found - reference).norm() / reference.norm()) < 1e-8


def test_ranks_that_see_images_later_add_up_the_gradients_of_the_tower() -> None:
    """A first step of text gives the tower none, and it stays without; the next has one on the other rank alone."""
    model = adapted(model_of("qwen3_vl"), "language", "vision")
    reducer = GradientReducer(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    of_tower = {id(p) for n, p in model.named_parameters() if "visual" in n}
    for others in (False, True, False):
        for parameter in trained:
            parameter.grad = None if id(parameter) in of_tower else torch.ones_like(parameter)
        has = [torch.tensor([others or id(p) not in of_tower for p in trained], dtype=torch.uint8)]
        group: Any = SimpleNamespace(all_gather=lambda mine, has=has: [mine, *has], all_reduce=lambda buffers: None)
        reducer.reduce(group)
        assert all(p.grad is None for p in trained if id(p) in of_tower) is not others
        assert all(p.grad is not None for p in trained if id(p) not in of_tower)


@pytest.mark.parametrize("model_type", [*FEW, *further(*(name for name in SEEING if name not in FEW))])
def test_the_engine_answers_as_transformers_does(model_type: str) -> None:
    """Greedily, prompts with images beside one without, two completions of each, and rows that wait for a place."""
    model = model_of(model_type).requires_grad_(False).eval()
    vision = vision_of(model)
    rows, pixels = rows_of(vision), PixelReader(vision, torch.float32, 2)
    wanted = []
    for tokens in rows:
        given = own_inputs(vision, tokens, pixels)
        mask = torch.ones_like(given["input_ids"])
        made = model.generate(
            **given, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=[-1], pad_token_id=0
        )
        wanted.append(made[0, len(tokens.input_ids) :].tolist())
    assert len({token for one in wanted for token in one}) > 3
    shown = [PromptImages(tokens, pixels) if tokens.images else None for tokens in rows]
    requests = [GenerationRequest(tuple(r.input_ids), 9, (0, 1), s) for r, s in zip(rows, shown, strict=True)]
    patch(model, "reference")
    engine = Engine(Forward(model, PLAN, CPU), EngineLayout(3, 3 * pages_of(LONGEST) + 1, False), LONGEST, PLAN, CPU)
    for answers, expected in zip(engine.complete(requests), wanted, strict=True):
        assert [one.tokens for one in answers] == [expected, expected]


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "mistral3"])
def test_answers_of_pairs_have_the_log_probabilities_of_transformers(model_type: str, layout: Any) -> None:
    """Of pairs with images beside one without, also where prompts would be shared."""
    model = model_of(model_type).requires_grad_(False).eval()
    vision, pixels = vision_of(model), PixelReader(vision_of(model), torch.float32, 1)
    rows = [row(vision, n, pieces) for n, pieces in enumerate([[3, (60, 60), 5], [3, (60, 60), 7], [4, 5], [4, 3]])]
    expected = []
    for tokens in rows:
        logits = model(**own_inputs(vision, tokens, pixels), use_cache=False).logits[0, :-1]
        labels = torch.tensor(tokens.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORE_INDEX)
        expected.append(-float(loss))
    patch(model, "reference")
    scorer = AnswerScorer(Batches(layout, "", layout == "unpadded"), 0, 300, 1.0, pixels=pixels)
    for chosen in (rows, rows[:2], rows[2:]):
        found = scorer.score(model, scorer.batch(chosen)).sums.tolist()
        first = rows.index(chosen[0])
        assert found == pytest.approx(expected[first : first + len(chosen)], rel=1e-5)
