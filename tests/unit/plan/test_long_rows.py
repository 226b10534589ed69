"""The estimate at great length: what goes to the host, and that nothing grows with the square."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.plan.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.preflight.checks import memory_and_disk
from tests.estimates import plan_of

GIB = 2**30
RECIPE = "lora: {r: 16}\ndata: {train: [a.jsonl], max_seq_len: 2048}\n"
NF4 = "quantization: {method: nf4}\n"
LONGEST = ("data.max_seq_len=343040", "lora.r=32", "train.gradient_checkpointing=offload")

Estimate = Callable[..., MemoryEstimate]


@pytest.fixture
def estimate(load: Callable[..., Any]) -> Estimate:
    """``estimate(model, host_gib, *overrides, text=...)``: for an H200 in a machine with so much free memory."""

    def _estimate(name: str, host_gib: float | None, *overrides: str, text: str = "") -> MemoryEstimate:
        loaded = load(f"model: {{name_or_path: {name}}}\n{RECIPE}{text}", *overrides)
        free = None if host_gib is None else int(host_gib * GIB)
        gpu = replace(named_device("h200"), host_free_bytes=free)
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        found = estimate_memory(plan_of(loaded.recipe, facts, gpu))
        assert found is not None
        return found

    return _estimate


LLAMA = "meta-llama/Llama-3.1-8B"


def test_the_host_decides_what_is_offloaded(estimate: Estimate, context: Callable[..., Any]) -> None:
    ample, short, none = (estimate(LLAMA, gib, *LONGEST, text=NF4) for gib in (200, 120, 90))
    assert (ample.offloaded, ample.pinned_host_bytes) == ("halves", 64 * 2680 * 2**20)
    assert (short.offloaded, short.pinned_host_bytes) == ("layers", 32 * 2680 * 2**20)
    assert none == short  # nothing leaner: the finding says so
    recipe = context("train: {gradient_checkpointing: offload}\n")
    assert not list(memory_and_disk.host_findings(recipe, short, 120 * GIB))
    assert [finding.code for finding in memory_and_disk.host_findings(recipe, none, 90 * GIB)] == ["FT603"]
    assert short.as_dict()["offloaded"] == "layers"


def test_nothing_is_known_of_a_named_devices_host(estimate: Estimate) -> None:
    assert estimate(LLAMA, None, *LONGEST, text=NF4).offloaded == "halves"
    assert estimate(LLAMA, 1, "train.gradient_checkpointing=true").offloaded is None


def test_the_longest_sequence_of_an_8b_model_fits_80_gb(estimate: Estimate) -> None:
    """343,040 tokens in one row. Twice the length takes twice the memory."""
    longest = estimate(LLAMA, 120, *LONGEST, text=NF4)
    assert 60e9 < longest.total_bytes < 70e9
    half = estimate(LLAMA, 60, *LONGEST, "data.max_seq_len=171520", text=NF4)
    shortlived = [sum(found.parts[n] for n in ("activations", "last workspace")) for found in (half, longest)]
    assert shortlived[1] == pytest.approx(2 * shortlived[0], rel=0.01)


@pytest.mark.parametrize(
    ("name", "settings", "head_dim", "masks"),
    [
        (LLAMA, [], 128, 0),
        (LLAMA, ["model.kernels=off"], 128, 0),
        (LLAMA, ["model.kernels=off", "data.packing=true"], 128, 1),
        (LLAMA, ["data.packing=true"], 128, 0),
        ("mistralai/Mistral-7B-v0.1", [], 128, 0),
        ("mistralai/Mistral-7B-v0.1", ["model.kernels=off"], 128, 1),
        ("google/gemma-2-9b", [], 256, 0),
        ("google/gemma-2-9b", ["model.kernels=off"], 256, 4),  # eager: both kinds, in half precision
    ],
)
def test_dense_masks_are_counted_where_one_is_made(
    name: str, settings: list[str], head_dim: int, masks: int, estimate: Estimate
) -> None:
    shape = ("data.max_seq_len=8192", "train.gradient_checkpointing=offload", "train.per_device_train_batch_size=1")
    tables = 2 * 8192 * head_dim * 2
    assert estimate(name, 200, *shape, *settings).parts["activations"] == masks * 8192**2 + tables
