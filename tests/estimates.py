"""Setups and memory estimates for tests: what a recipe comes to on a device, by command."""

from __future__ import annotations

from typing import Any

from ftcli.config.recipe import Recipe
from ftcli.facts.device import DeviceFacts, named_device
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.plan.memory.advice import verdict_on
from ftcli.plan.memory.candidates import candidate
from ftcli.plan.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.plan.run import RunPlan
from ftcli.tables import methods

#: A recipe's sections for GRPO.
GRPO = """
train: {per_device_train_batch_size: 8, gradient_accumulation_steps: 4, gradient_checkpointing: true}
grpo: {num_generations: 8, max_prompt_length: 256, max_completion_length: 256, rewards: [{use: exact_match}]}
"""


def plan_of(recipe: Recipe, facts: ModelFacts, device: DeviceFacts | str, work: str = "train") -> RunPlan:
    """``work``: ``train``, ``eval``, ``export``, or the name of a training method."""
    gpu = named_device(device) if isinstance(device, str) else device
    if work in methods.TABLE:
        return RunPlan(recipe, facts, gpu, "train", methods.row(work))
    return RunPlan(recipe, facts, gpu, work, methods.row("sft"))  # type: ignore[arg-type]


def estimate_of(recipe: Recipe, facts: ModelFacts, device: DeviceFacts | str, work: str = "train") -> MemoryEstimate:
    """The estimate; the family must have arithmetic."""
    found = estimate_memory(plan_of(recipe, facts, device, work))
    assert found is not None
    return found


class Case:
    """A recipe for a bundled model, and its estimates. Where it leaves the policy open, everything is kept."""

    def __init__(self, loaded: Any) -> None:
        self.loaded = loaded
        self.recipe = loaded.recipe
        if self.recipe.train.gradient_checkpointing == "auto":
            train = self.recipe.train.model_copy(update={"gradient_checkpointing": False})
            self.recipe = self.recipe.model_copy(update={"train": train})
        self.facts: ModelFacts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)

    def estimate(self, device: str = "h100", work: Any = "train") -> MemoryEstimate:
        return estimate_of(self.recipe, self.facts, device, work)

    def verdict(self, device: Any, work: Any = "train") -> Any:
        found = candidate(plan_of(self.recipe, self.facts, device, work))
        assert found is not None
        return verdict_on(found)
