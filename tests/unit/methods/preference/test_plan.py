"""Pairs on several GPUs before anything is built: the engine that ``auto`` picks, what is refused, and the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.plan.checkpointing import choose_engine
from ftcli.preflight.checks import support
from tests.estimates import Case, plan_of

EIGHT = "model: {name_or_path: meta-llama/Llama-3.1-8B}\ndata: {train: [a.jsonl], max_seq_len: 8192}\n"
DPO = "train: {method: dpo, gradient_checkpointing: true, per_device_train_batch_size: 2}\n"
LORA = "lora: {r: 16}\n"
LIVE = "preference: {reference_cache: off}\n"
PARAMETERS = 8_030_261_248


def case(load: Callable[..., Any], text: str, **launch: Any) -> Case:
    return Case(load(text, *(f"launch.{key}={value}" for key, value in launch.items())))


@pytest.mark.parametrize(
    ("adapters", "gpus", "device", "engine"),
    [("", 8, "h100", "fsdp"), (LORA, 2, "h100", "ddp"), (LORA, 4, "rtx4090", "fsdp")],
    ids=["all weights", "adapters on a base that fits", "adapters on a base that does not"],
)
def test_auto_shards_what_it_shards_of_supervised_runs(
    load: Callable[..., Any], adapters: str, gpus: int, device: str, engine: str
) -> None:
    recipe = case(load, EIGHT + DPO + adapters, num_processes=gpus)
    plan = plan_of(recipe.recipe, recipe.facts, device, "dpo")
    assert choose_engine(plan).recipe.launch.engine == engine


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo"])
@pytest.mark.parametrize("launch", ["engine=fsdp", "context_parallel_size=2", "dp_replicate_size=2"])
def test_every_engine_is_supported(context: Callable[..., Any], method: str, launch: str) -> None:
    asked = context(
        EIGHT + LORA, f"train.method={method}", "data.format=preference", "launch.num_processes=4", f"launch.{launch}"
    )
    assert not list(support.check(asked, lambda _: True))


def test_the_reference_is_sharded_like_the_model(load: Callable[..., Any]) -> None:
    whole, half, eighth = (
        case(load, EIGHT + DPO + LIVE, num_processes=count, engine=engine).estimate("h200", "dpo").parts
        for count, engine in ((2, "ddp"), (2, "fsdp"), (8, "fsdp"))
    )
    assert whole["reference model"] == 4 * PARAMETERS
    assert half["reference model"] == whole["reference model"] / 2
    assert eighth["reference model"] == whole["reference model"] / 8
    assert "reference model" not in case(load, EIGHT + DPO, num_processes=2).estimate("h200", "dpo").parts
    assert "reference model" not in case(load, EIGHT + DPO + LORA, num_processes=2).estimate("h200", "dpo").parts


def test_of_shared_rows_a_rank_has_its_part(load: Callable[..., Any]) -> None:
    alone, shared = (
        case(load, EIGHT + DPO + LORA, num_processes=2, context_parallel_size=parts).estimate("h200", "dpo").parts
        for parts in (1, 2)
    )
    assert shared["activations"] == pytest.approx(alone["activations"] / 2, rel=0.01)
    assert shared["loss workspace"] <= alone["loss workspace"]
    assert shared["exchanged heads"] > 0


def test_a_sharded_head_is_not_cast_again(load: Callable[..., Any]) -> None:
    """It is all-gathered in the compute dtype; its gradient is summed in float32 and then rounded."""
    head = 128256 * 4096
    whole, half = (
        case(load, EIGHT + DPO, num_processes=2, engine=engine).estimate("h200", "dpo").parts
        for engine in ("ddp", "fsdp")
    )
    assert whole["loss workspace"] - half["loss workspace"] == 2 * head
    assert half["head gradient"] == (4 + 2) * head
