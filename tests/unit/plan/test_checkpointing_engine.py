"""``launch.engine: auto``: sharded over GPUs is what does not fit one, and what is trained whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftcli.facts.model import read_facts
from ftcli.plan.checkpointing import choose_engine
from ftcli.plan.memory.candidates import candidate
from tests.estimates import plan_of

EIGHT = "model: {name_or_path: meta-llama/Llama-3.1-8B}\n"
SEVENTY = "model: {name_or_path: meta-llama/Llama-3.1-70B}\n"
EXPERTS = "model: {name_or_path: Qwen/Qwen3-30B-A3B}\n"
LORA, NF4 = "lora: {r: 16}\n", "quantization: {method: nf4}\n"


@pytest.mark.parametrize(
    ("recipe", "gpus", "device", "engine"),
    [
        (EIGHT + LORA, 2, "h100", "ddp"),
        (EIGHT, 8, "h100", "fsdp"),
        (EIGHT + "model_kernels_off", 8, "h100", "fsdp"),
        (EIGHT + "train: {optim: adafactor}\n", 8, "h100", "ddp"),
        (SEVENTY + LORA + NF4, 2, "h200", "ddp"),
        (SEVENTY + LORA + NF4, 4, "rtx4090", "fsdp"),
        (SEVENTY + LORA, 8, "h100", "fsdp"),
        (SEVENTY + LORA, 1, "h100", "auto"),
        (EXPERTS + LORA, 4, "a100-40gb", "fsdp"),
        (EXPERTS + LORA + NF4, 4, "rtx4090", "fsdp"),
        (EXPERTS + LORA + NF4, 4, "h100", "ddp"),
    ],
)
def test_auto(load: Callable[..., Any], recipe: str, gpus: int, device: str, engine: str) -> None:
    off = ["model.kernels=off"] if "model_kernels_off" in recipe else []
    loaded = load(recipe.replace("model_kernels_off", ""), f"launch.num_processes={gpus}", *off)
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    assert choose_engine(plan_of(loaded.recipe, facts, device)).recipe.launch.engine == engine


def test_every_gpu_needs_its_share(load: Callable[..., Any]) -> None:
    def needed(count: int, engine: str) -> Any:
        loaded = load(EIGHT, f"launch.num_processes={count}", f"launch.engine={engine}")
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        found = candidate(plan_of(loaded.recipe, facts, "h100").under(True))
        assert found is not None
        return found.estimate.parts

    whole, half, eighth = needed(2, "ddp"), needed(2, "fsdp"), needed(8, "fsdp")
    for name in ("weights", "gradients", "optimizer"):
        assert half[name] == pytest.approx(whole[name] / 2, rel=1e-6)
        assert eighth[name] == pytest.approx(whole[name] / 8, rel=1e-6)
    assert half["gathered weights"] == eighth["gathered weights"]
    assert "gradients of all ranks" in whole
    assert "gradients of all ranks" not in half
