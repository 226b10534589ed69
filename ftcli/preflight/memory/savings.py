"""What single changes to a recipe would save, for whoever has run out of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ftcli.config import LoraConfig, Recipe
from ftcli.config.training import Checkpointing
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan, plan_dtypes
from ftcli.preflight.execution import Work
from ftcli.preflight.memory.advice import (
    Change,
    Settings,
    by_time,
    checkpointed,
    shorter,
    smaller_batches,
    with_settings,
)
from ftcli.preflight.memory.estimate import estimate_memory
from ftcli.preflight.memory.policy import leaner_policies, on_kernels


@dataclass(frozen=True, slots=True)
class Saving:
    """Settings, as ``--set`` would take them, and by how many bytes the estimate falls with them."""

    settings: tuple[tuple[str, Any], ...]
    saved_bytes: int

    def __str__(self) -> str:
        return str(Change(self.settings, 0))


def savings(
    recipe: Recipe, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts, *, work: Work, phase: str | None = None
) -> tuple[Saving, ...]:
    """What each single change to a recipe is predicted to save, cheapest for the user first.

    Args:
        phase: Of the estimate's phases the one that memory ran out in; None, and a name that it does not have: the
            one that needs most.

    Empty for a model family that there is no arithmetic for, and where nothing helps.
    """
    before = estimate_memory(recipe, facts, plan, device, work=work)
    if before is None:
        return ()
    found = []
    kernels, leaner = on_kernels(recipe, facts, plan, device, work), leaner_policies(recipe, facts, device, work)
    for settings in _single_changes(recipe, work, phase, leaner, kernels=kernels):
        changed = with_settings(recipe, settings)
        after = estimate_memory(changed, facts, plan_dtypes(changed, device), device, work=work)
        if after is None:
            continue
        known = phase if phase in before.phases and phase in after.phases else None
        saved = (
            before.phase_bytes(known) - after.phase_bytes(known) if known else before.total_bytes - after.total_bytes
        )
        if saved > 0:
            found.append(Saving(tuple(settings.items()), saved))
    return tuple(found)


def _single_changes(
    recipe: Recipe, work: Work, phase: str | None, policies: Iterable[Checkpointing], *, kernels: bool
) -> Iterator[Settings]:
    """One step down in each direction; first those that only cost time."""
    if phase == "evaluation":
        rows = recipe.eval.per_device_eval_batch_size
        if rows > 1:
            yield {"eval.per_device_eval_batch_size": rows // 2}
        return
    changes = [*islice(smaller_batches(recipe), 1), *checkpointed(recipe, policies)]
    yield from by_time(recipe, work, changes, kernels=kernels)
    yield from islice(shorter(recipe, work), 1)
    if recipe.lora is None and work == "train":
        yield {"lora": LoraConfig()}
