"""``launch.dp_replicate_size``: what is refused, and what each GPU needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftcli.facts.model import read_facts
from ftcli.plan.checkpointing import choose_engine
from ftcli.plan.memory.candidates import candidate
from ftcli.preflight.checks import machine
from tests.estimates import plan_of

LLAMA = "model: {name_or_path: meta-llama/Llama-3.1-8B}\ndata: {train: [a.jsonl]}\n"


@pytest.mark.parametrize(
    ("settings", "message", "help"),
    [
        (
            ("launch.num_processes=8", "launch.dp_replicate_size=3"),
            "needs launch.num_processes divisible by 3",
            "2 or 4",
        ),
        (("launch.num_processes=4", "launch.dp_replicate_size=4"), "at least 8; it is 4", "2"),
        (("launch.dp_replicate_size=2",), "at least 4; it is 1", "start at least 4 processes"),
        (
            ("launch.num_processes=4", "launch.dp_replicate_size=2", "launch.engine=ddp"),
            "every process has a copy",
            "launch.engine: fsdp",
        ),
    ],
)
def test_copies_that_cannot_be(settings: tuple[str, ...], message: str, help: str, context: Callable[..., Any]) -> None:
    (finding,) = machine.check_copies(context(LLAMA, *settings))
    assert finding.code == "FT287"
    assert message in finding.message
    assert help in finding.help


@pytest.mark.parametrize(
    ("recipe", "hosts", "device", "copies"),
    [
        (LLAMA, 2, "h100", 2),  # full fine-tuning of 8B on eight
        (LLAMA, 1, "h100", 1),
        (LLAMA, 3, "h100", 1),  # sixteen processes are not three times as many
        (LLAMA, 16, "h100", 1),  # one on each host is nothing to shard over
        (LLAMA.replace("8B", "70B"), 2, "h100", 1),  # too large for eight
        (LLAMA + "launch: {dp_replicate_size: 1}\n", 2, "h100", 1),
        (LLAMA + "lora: {r: 16}\n", 2, "h100", 1),  # whole on each GPU
    ],
)
def test_each_host_has_a_copy_where_it_fits(
    recipe: str, hosts: int, device: str, copies: int, load: Callable[..., Any]
) -> None:
    loaded = load(recipe, "launch.num_processes=16")
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    plan = choose_engine(replace(plan_of(loaded.recipe, facts, device), hosts=hosts))
    assert plan.recipe.launch.copies == copies


def test_each_gpu_has_its_part_of_a_copy(load: Callable[..., Any]) -> None:
    def needed(*settings: str) -> Any:
        loaded = load(LLAMA + "lora: {r: 16}\n", *settings)
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        plan = choose_engine(plan_of(loaded.recipe, facts, "h100"))
        assert plan.recipe.launch.engine == "fsdp"  # though one GPU would take the model
        found = candidate(plan.under(True))
        assert found is not None
        return found.estimate.parts

    two = needed("launch.num_processes=2", "launch.engine=fsdp")
    copied = needed("launch.num_processes=8", "launch.dp_replicate_size=4")
    assert copied["weights"] == two["weights"]
    assert copied["gathered weights"] == two["gathered weights"]
