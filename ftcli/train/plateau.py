"""Schedules that follow evaluations, for numbers of either sign.

A relative threshold asks that a number falls by a share of the best one. torch and transformers multiply the best by
1 - threshold, which lies above a negative best: an evaluation that repeats it would count as better, and the rate would
never fall. Scores of tasks are such numbers, since what is told is to be minimised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from transformers.optimization import GreedyLR


def is_better(value: float, best: float, threshold: float, *, relative: bool) -> bool:
    """Whether ``value`` is less than ``best`` by more than the threshold, or by that share of its size."""
    if not relative:
        return value < best - threshold
    return value < best * (1.0 - threshold if best > 0 else 1.0 + threshold)


class _Plateau(ReduceLROnPlateau):
    def _is_better(self, a: float, best: float) -> bool:
        return is_better(a, best, self.threshold, relative=self.threshold_mode == "rel")


class _Greedy(GreedyLR):  # type: ignore[misc]  # transformers is not typed
    def is_better(self, current: float, best: float) -> bool:
        return is_better(current, best, self.threshold, relative=self.threshold_mode == "rel")


_SCHEDULES: dict[str, Any] = {"reduce_lr_on_plateau": _Plateau, "greedy": _Greedy}


def by_evaluations(name: str, optimizer: Any, arguments: Mapping[str, float | int | str]) -> LRScheduler:
    """The schedule of this name."""
    made: LRScheduler = _SCHEDULES[name](optimizer, **arguments)
    return made
