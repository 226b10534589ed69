"""Setups and memory estimates for tests: what a recipe comes to on a device, by command."""

from __future__ import annotations

from ftcli.config import Recipe
from ftcli.facts.device import DeviceFacts, named_device
from ftcli.facts.model import ModelFacts
from ftcli.preflight.memory.estimate import MemoryEstimate, estimate_memory
from ftcli.preflight.memory.setup import Setup
from ftcli.tables import methods


def setup_of(recipe: Recipe, facts: ModelFacts, device: DeviceFacts | str, work: str = "train") -> Setup:
    """``work``: ``train``, ``eval``, ``export``, or the name of a training method."""
    gpu = named_device(device) if isinstance(device, str) else device
    if work in methods.TABLE:
        return Setup(recipe, facts, gpu, "train", methods.row(work))
    return Setup(recipe, facts, gpu, work, methods.row("sft"))  # type: ignore[arg-type]


def estimate_of(recipe: Recipe, facts: ModelFacts, device: DeviceFacts | str, work: str = "train") -> MemoryEstimate:
    """The estimate; the family must have arithmetic."""
    found = estimate_memory(setup_of(recipe, facts, device, work))
    assert found is not None
    return found
