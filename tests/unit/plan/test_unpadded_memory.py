"""The memory estimate of unpadded micro-batches: that of full rows, rounded up, never less than padded rows need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.plan.batches import bucket
from ftcli.plan.memory.estimate import estimate_memory
from tests.estimates import Case, plan_of

Cases = Callable[..., Case]
TEXT = "model: {name_or_path: %s}\nlora: {r: 16}\ndata: {max_seq_len: %d, packing: %s}\n"


@pytest.fixture
def cases(load: Any) -> Cases:
    def _case(model: str, longest: int, rows: int, packing: str, free: str) -> Case:
        policy = "train.gradient_checkpointing=false"
        batch = f"train.per_device_train_batch_size={rows}"
        # Graphs of the smaller micro-batches among them take memory besides: test_graphs.py.
        settings = (policy, batch, f"data.padding_free={free}", "train.cuda_graphs=false")
        return Case(load(TEXT % (model, longest, packing), *settings))

    return _case


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B", "google/gemma-2-9b"])
@pytest.mark.parametrize(("longest", "rows"), [(4096, 2), (1000, 3), (2048, 8), (70, 7), (5000, 1)])
@pytest.mark.parametrize("packing", ["false", "true"])
def test_on_the_kernels_it_is_that_of_full_rows_rounded_up(
    cases: Cases, model: str, longest: int, rows: int, packing: str
) -> None:
    padded, unpadded = (cases(model, longest, rows, packing, free) for free in ("false", "auto"))
    for work in ("train", "eval"):
        before, after = padded.estimate("h200", work), unpadded.estimate("h200", work)
        assert after.allocated_bytes >= before.allocated_bytes
        if bucket(rows * longest) == rows * longest and work == "train":
            assert after.allocated_bytes <= 1.001 * before.allocated_bytes
    plan = plan_of(unpadded.recipe, unpadded.facts, "h200")
    assert plan.execution.batches.layout == "unpadded"
    assert plan.tokens == bucket(rows * longest, plan.execution.batches.few_up_to)
    assert plan_of(padded.recipe, padded.facts, "h200").tokens == rows * longest


def test_where_a_mask_keeps_documents_apart_it_is_counted(cases: Cases) -> None:
    """Bytes, or numbers of the scores' size, for all pairs of 8 x 512 tokens; once for all layers at least."""
    padded, unpadded = (
        cases("meta-llama/Llama-3.1-8B", 512, 8, "false", free).estimate("cpu") for free in ("auto", "true")
    )
    assert unpadded.parts["activations"] - padded.parts["activations"] >= (8 * 512) ** 2


def test_nothing_changes_where_batches_stay_padded(cases: Cases) -> None:
    auto, off = (cases("meta-llama/Llama-3.1-8B", 1000, 3, "false", free).estimate("t4") for free in ("auto", "false"))
    assert auto == off


PAIRS = "model: {name_or_path: meta-llama/Llama-3.1-8B-Instruct}\n%s\ndata: {max_seq_len: 1280}\n"
STEP = "train: {method: dpo, per_device_train_batch_size: 4, gradient_accumulation_steps: 1, cuda_graphs: false}\n"


@pytest.mark.parametrize(
    ("kind", "engine", "apart", "measured"),
    [("lora: {r: 16}", "ddp", 45.34, 39.3), ("preference: {reference_cache: ./ahead}", "fsdp", 83.66, 73.4)],
    ids=["lora", "full"],
)
def test_what_pairs_are_known_to_share_is_counted_once(
    load: Any, kind: str, engine: str, apart: float, measured: float
) -> None:
    """Four pairs of 512 + 2 x 768 tokens on each of two H200 (docs/performance.md)."""
    text = PAIRS % kind + STEP + f"launch: {{engine: {engine}, num_processes: 2}}\n"
    case = Case(load(text, "train.gradient_checkpointing=false"))
    plan = plan_of(case.recipe, case.facts, "h200", "dpo")
    found = []
    for prompt, tokens in ((0, 8 * 1280), (512, 4 * (512 + 2 * 768))):
        known = replace(plan, prompt_tokens=prompt)
        assert known.tokens == tokens
        estimate = estimate_memory(known)
        assert estimate is not None
        found.append(estimate.allocated_bytes / 2**30)
    assert found[0] == pytest.approx(apart, abs=0.1)
    assert 0.97 <= found[1] / measured <= 1.10
    padded = Case(load(text, "data.padding_free=false", "train.gradient_checkpointing=false")).recipe
    assert replace(plan, recipe=padded, prompt_tokens=512).tokens == 8 * 1280


def test_what_ranks_exchange_is_kept_twice(load: Any) -> None:
    """Attention's output, as it was made and as it came back: 31.8 GiB on each of two H200 (docs/performance.md)."""
    text = PAIRS % "lora: {r: 16}" + STEP + "launch: {engine: ddp, num_processes: 2, context_parallel_size: 2}\n"
    case = Case(load(text, "train.gradient_checkpointing=false"))
    estimate = estimate_memory(plan_of(case.recipe, case.facts, "h200", "dpo"))
    assert estimate is not None
    assert 0.97 <= estimate.allocated_bytes / 2**30 / 31.8 <= 1.10
