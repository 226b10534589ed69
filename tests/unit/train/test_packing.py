"""Packed documents do not see each other, for every family and backend, and train the same loss as alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

from ftcli.data.collate import packed_batch, padded_batch
from ftcli.data.order import best_fit
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import ExitCode, FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import hidden_states
from ftcli.model.loss import forward_loss
from ftcli.plan.precision import DtypePlan
from ftcli.rows.row import Row
from ftcli.tables.families import TABLE
from ftcli.tables.packing import LEAKING
from ftcli.train.assembly import check_isolation
from tests.small_models import SCALED_BY_POSITION, TEXT, by_kind
from tests.tiers import in_turn

FLOAT32 = DtypePlan("float32", None, "float32", False, "test")
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 6,
    "pad_token_id": 0,
}
#: Those that leak off the kernels are tried on them: tests/unit/model/test_delta_layer.py.
FAMILIES = sorted((set(TABLE) & set(TEXT)) - set(LEAKING))
CAPPED = [name for name in FAMILIES if TABLE[name].attention_softcap is not None]
#: So that the later positions of a document have another factor of queries, and nothing is dropped.
CHANGES: dict[str, dict[str, Any]] = {
    "ministral3": {"rope_parameters": {**SCALED_BY_POSITION, "factor": 32.0, "original_max_position_embeddings": 4}},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    **{
        name: TEXT[name] for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
    },  # the widths of their latents
}


def model_of(family: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    values = {**SMALL, **CHANGES.get(family, {})}
    if family in CAPPED:
        values["attn_logit_softcapping"] = 50.0
    config = AutoConfig.for_model(family, **values)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def rows(count: int, longest: int = 40) -> list[TokenizedRow]:
    rng = Random(1)
    made = []
    for number in range(count):
        ids = [rng.randrange(1, 97) for _ in range(rng.randint(3, longest))]
        masked = rng.randint(1, len(ids) - 1)
        made.append(TokenizedRow(Row("d", number, {}), ids, [IGNORE_INDEX] * masked + ids[masked:]))
    return made


def logits(model: PreTrainedModel, packs: Sequence[Sequence[TokenizedRow]]) -> torch.Tensor:
    batch = packed_batch(packs, 0)
    with torch.no_grad():
        return model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits


@pytest.mark.parametrize(("family", "attention"), in_turn(by_kind(FAMILIES), ["eager", "sdpa"]))
def test_one_changed_document_leaves_the_others_logits_bit_equal(family: str, attention: str) -> None:
    if family in CAPPED and attention == "sdpa":
        pytest.skip("SDPA cannot cap scores; transformers refuses it")
    model = model_of(family, attention)
    a, b, c, d, e = rows(5)
    changed = TokenizedRow(b.row, [i % 96 + 1 for i in b.input_ids], b.labels)
    before, after = logits(model, [[a, b, c], [d, e]]), logits(model, [[a, changed, c], [d, e]])
    start = len(a.input_ids)
    end = start + len(b.input_ids)
    # transformers multiplies all tokens of an expert at once, and how many those are changes bits.
    experts = family in TABLE and TABLE[family].experts is not None
    same = partial(torch.allclose, rtol=1e-5, atol=1e-6) if experts else torch.equal
    assert same(before[0, :start], after[0, :start])
    assert same(before[0, end:], after[0, end:])
    assert same(before[1], after[1])
    assert not torch.equal(before[0, start:end], after[0, start:end])
    alone = logits(model, [[c]])
    torch.testing.assert_close(before[0, end : end + len(c.input_ids)], alone[0], rtol=1e-4, atol=1e-5)
    check_isolation(model, [a, b, c, d, e], FLOAT32, torch.device("cpu"), pad_token_id=0)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_loss_and_gradient_are_those_of_the_rows_alone(family: str) -> None:
    model = model_of(family, "eager")
    documents = rows(24)
    items = sum(label != IGNORE_INDEX for row in documents for label in row.labels)
    packs = best_fit([len(row.input_ids) for row in documents], 64)
    assert len(packs) < len(documents) / 2
    batches = [packed_batch([[documents[row] for row in packs.members(n)] for n in range(len(packs))], 0)]
    alone = [padded_batch([row], 0) for row in documents]
    results = []
    for made in (batches, alone):
        model.zero_grad()
        loss = sum(
            forward_loss(model, {k: v for k, v in b.items() if k != "lengths"}, num_items=items).loss for b in made
        )
        loss.backward()
        results.append((float(loss.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (packed, packed_gradients), (unpacked, gradients) = results
    assert packed == pytest.approx(unpacked, abs=1e-5)
    for found, wanted in zip(packed_gradients, gradients, strict=True):
        assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-7


def leaking(change: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrapped(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
        return hidden_states(model, change(inputs))

    monkeypatch.setattr("ftcli.train.assembly.hidden_states", wrapped)


def test_a_model_that_lets_documents_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", "eager")
    leaking(lambda inputs: {"input_ids": inputs["input_ids"]}, monkeypatch)
    with pytest.raises(FtcliError, match="FT443") as caught:
        check_isolation(model, rows(5), FLOAT32, torch.device("cpu"), pad_token_id=0)
    assert caught.value.exit_code == ExitCode.PREFLIGHT


def run_on(inputs: dict[str, Any]) -> dict[str, Any]:
    """A mask between documents, and positions that run on through the row."""
    starts = inputs["position_ids"] == 0
    document = starts.cumsum(-1)
    seen = document[:, None, :, None] == document[:, None, None, :]
    mask = seen & torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
    floats = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return {"input_ids": inputs["input_ids"], "attention_mask": floats}


def learned_positions() -> PreTrainedModel:
    """GPT-2 adds learned positions: with a mask between documents and positions that run on, no neighbour is seen."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_positions_that_run_on_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = learned_positions()
    check_isolation(model, rows(5), FLOAT32, torch.device("cpu"), pad_token_id=0)
    leaking(run_on, monkeypatch)
    with pytest.raises(FtcliError, match="FT443"):
        check_isolation(model, rows(5), FLOAT32, torch.device("cpu"), pad_token_id=0)


@pytest.mark.parametrize(
    ("noise", "change", "refused"),
    [(0.1, None, False), (0.1, run_on, True), (0.5, None, True)],
    ids=["80 layers' rounding", "positions that run on beside it", "more than rounding"],
)
def test_rounding_of_deep_models_is_told_from_what_a_document_must_not_see(
    noise: float,
    change: Callable[[dict[str, Any]], dict[str, Any]] | None,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other shapes round differently, the same one always alike: so does this noise, of the size that 80 layers of
    random weights showed on an H200.
    """
    model = learned_positions()

    def rounded(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
        found = hidden_states(model, inputs if change is None else change(inputs))
        generator = torch.Generator().manual_seed(found.tensor.shape[1])
        parts = torch.randn(found.tensor.shape, generator=generator)
        return replace(found, tensor=found.tensor * (1 + noise / 2**0.5 * parts))

    monkeypatch.setattr("ftcli.train.assembly.hidden_states", rounded)
    plan = replace(FLOAT32, compute="bfloat16")
    with pytest.raises(FtcliError, match="FT443") if refused else nullcontext():
        check_isolation(model, rows(5), plan, torch.device("cpu"), pad_token_id=0)
