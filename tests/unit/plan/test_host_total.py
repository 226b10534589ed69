"""Memory of the host: what all of its processes need at once, and what is said where there is less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.facts.device import named_device
from ftcli.facts.model import read_facts
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.memory.host_total import HostEstimate, host_estimate
from ftcli.preflight.stages import preflight
from tests.estimates import plan_of

GIB = 2**30
EIGHT = "model: {name_or_path: meta-llama/Llama-3.1-8B}\ntrain: {gradient_checkpointing: true}\n"
LORA = "lora: {r: 16}\n"


@pytest.fixture
def host(load: Callable[..., Any]) -> Callable[..., HostEstimate]:
    def _host(text: str, *overrides: str, device: Any = "h100", processes: int = 1) -> HostEstimate:
        loaded = load(text, *overrides)
        plan = plan_of(loaded.recipe, read_facts(loaded.recipe.model, offline=True, origins=loaded.origins), device)
        memory = estimate_memory(plan)
        assert memory is not None
        return host_estimate(plan, memory, processes)

    return _host


def test_rank_0_gathers_a_sharded_checkpoint_once(host: Callable[..., HostEstimate]) -> None:
    """8.03 billion parameters have 8 bytes of AdamW's state each, as many as two copies of the weights."""
    sharded = host(EIGHT, "launch.num_processes=8", "launch.engine=fsdp", processes=8)
    assert sharded.peak == "saving"
    assert sharded.parts["gathered checkpoint"] == pytest.approx(8 * 8.03e9, rel=0.001)
    assert sharded.total_bytes == sharded.parts["processes"] + sharded.parts["gathered checkpoint"]
    whole = host(EIGHT)
    assert whole.parts["gathered checkpoint"] == pytest.approx(4 * 8.03e9, rel=0.001)
    assert host(EIGHT + LORA).parts["gathered checkpoint"] < 0.2 * GIB


def test_every_process_has_a_tensor_and_pinned_memory_of_its_own(host: Callable[..., HostEstimate]) -> None:
    one = host(EIGHT + LORA)
    assert one.parts["tensors being loaded"] == 128256 * 4096 * 4  # the embedding in bfloat16, stored and held
    offload = EIGHT.replace("true", "offload") + LORA
    alone, four = host(offload), host(offload, "launch.num_processes=4", processes=4)
    assert alone.parts["pinned memory"] > 0
    for name in ("processes", "tensors being loaded", "pinned memory"):
        assert four.parts[name] == 4 * alone.parts[name]
    assert host(EIGHT + LORA, "model.init=random").parts["tensors being loaded"] == 0


def test_on_a_cpu_the_host_has_what_a_gpu_would_have(host: Callable[..., HostEstimate]) -> None:
    text = "model: {name_or_path: 'bundled:tiny-gemma2'}\ntrain: {gradient_checkpointing: false}\n"
    one, two = host(text, device="cpu"), host(text, "launch.num_processes=2", device="cpu", processes=2)
    assert two.phase_bytes("training") > 1.9 * one.phase_bytes("training")


@pytest.mark.parametrize(("free", "codes"), [(200, []), (60, ["FT604"]), (None, [])])
def test_a_host_with_less_is_warned_of(load: Callable[..., Any], free: int | None, codes: list[str]) -> None:
    loaded = load(
        EIGHT + "data: {train: [bundled:sample-chat], max_seq_len: 1024}\n",
        *("launch.num_processes=8", "launch.engine=fsdp", "model.tokenizer=bytes", "model.init=random"),
    )
    device = replace(named_device("h200"), host_free_bytes=None if free is None else free * GIB)
    report = preflight(loaded, command="check", device=device, offline=True)
    found = [finding for finding in report.findings if finding.code == "FT604"]
    assert [finding.code for finding in found] == codes
    for finding in found:
        assert "saving of 8 processes takes about 83.8 GiB of host memory" in finding.message
    assert report.as_dict()["host_memory"] is report.host
    assert report.host is not None
