"""Rows that several processes share: what is refused, and the memory of each process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.preflight.checks import machine
from ftcli.preflight.checks.context import Context
from ftcli.preflight.checks.machine import check_model
from tests.estimates import Case, plan_of

LLAMA = "lora: {r: 16}\ndata: {train: [a.jsonl], max_seq_len: 65536}\n"


@pytest.mark.parametrize(
    ("settings", "message", "help"),
    [
        (
            ("launch.num_processes=4", "launch.context_parallel_size=3"),
            "3 does not divide launch.num_processes 4",
            "2 or 4",
        ),
        (("launch.context_parallel_size=2",), "2 does not divide launch.num_processes 1", "--gpus 2"),
        (
            ("launch.num_processes=2", "launch.context_parallel_size=2", "train.neftune_noise_alpha=5"),
            "neftune_noise_alpha",
            "remove",
        ),
        (
            ("launch.num_processes=2", "launch.context_parallel_size=2", "launch.engine=single"),
            "launch.engine: single",
            "ddp or fsdp",
        ),
    ],
)
def test_what_needs_whole_rows_is_refused(
    settings: tuple[str, ...], message: str, help: str, context: Callable[..., Any]
) -> None:
    (finding,) = machine.check_shared_rows(context(LLAMA, *settings))
    assert finding.code == "FT286"
    assert message in finding.message
    assert help in finding.help


def test_teams_that_fit_are_not_refused(context: Callable[..., Any]) -> None:
    asked = context(LLAMA, "launch.num_processes=4", "launch.context_parallel_size=2")
    assert not list(machine.check_shared_rows(asked))


def case(load: Callable[..., Any], *settings: str) -> Case:
    text = f"model: {{name_or_path: meta-llama/Llama-3.1-8B}}\n{LLAMA}quantization: {{method: nf4}}\n"
    return Case(load(text, "train.gradient_checkpointing=true", *settings))


def refused(load: Callable[..., Any], *settings: str, **language: Any) -> list[str]:
    found = case(load, *settings)
    facts = replace(found.facts, language={**found.facts.language, **language})
    asked = Context(found.recipe, found.loaded.origins, "check")
    return [each.message for each in check_model(asked, plan_of(found.recipe, facts, "h100"))]


def test_a_process_holds_the_activations_of_its_part(load: Callable[..., Any]) -> None:
    alone = case(load).estimate()
    shared = case(load, "launch.num_processes=2", "launch.context_parallel_size=2").estimate()
    assert shared.parts["activations"] == pytest.approx(alone.parts["activations"] / 2, rel=0.01)
    assert shared.parts["weights"] == alone.parts["weights"]
    # sent and received: 32 query heads, 8 key and 8 value heads of 128, in bfloat16
    assert shared.parts["exchanged heads"] == 2 * 32768 * (32 + 8 + 8) * 128 * 2
    assert shared.total_bytes < 0.7 * alone.total_bytes


def test_models_that_cannot_share_rows_are_refused_with_the_reason(load: Callable[..., Any]) -> None:
    teams = ("launch.num_processes=5", "launch.context_parallel_size=5")
    assert "32 attention heads cannot be shared by 5" in refused(load, *teams)[0]
    two = ("launch.num_processes=2", "launch.context_parallel_size=2")
    assert not refused(load, *two)
    assert "model.kernels: off" in refused(load, *two, "model.kernels=off")[0]
    nets = refused(load, *two, "model.name_or_path=Qwen/Qwen3.5-9B")[0]
    assert "delta nets carry a state from token to token" in nets
    assert "kind dynamic depend" in refused(load, *two, rope_parameters={"rope_type": "dynamic", "factor": 2.0})[0]
