"""Schedules that follow evaluations, held against torch's own on scores of which more is better."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR

from ftcli.config.training import TrainConfig
from ftcli.train.optimizer import make_schedule

NAMES = {"reduce_lr_on_plateau": ReduceLROnPlateau, "greedy": GreedyLR}
BOUNDS = {"greedy": {"min_lr": 1e-6, "max_lr": 1.0}}


def optimizer() -> Any:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)


def rates(schedule: Any, values: list[float]) -> list[float]:
    """The learning rate after each evaluation."""
    found = []
    for value in values:
        schedule.step(value)
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


def ours(name: str, **arguments: Any) -> Any:
    settings = TrainConfig(lr_scheduler_type=name, lr_scheduler_kwargs={**BOUNDS.get(name, {}), **arguments})
    return make_schedule(optimizer(), settings, 50)


def theirs(name: str, mode: str, **arguments: Any) -> Any:
    return NAMES[name](optimizer(), mode=mode, **{**BOUNDS.get(name, {}), **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [{}, {"threshold_mode": "rel", "threshold": 0.05}, {"threshold_mode": "abs"}])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_scores_move_the_rate_as_in_torch_where_more_is_better(name: str, threshold: dict[str, Any], seed: int) -> None:
    """Of twenty questions, so that many evaluations tie; what is told is the negated score."""
    rng = Random(seed)
    scores = [rng.randrange(8, 20) / 20 for _ in range(60)]
    arguments = {"patience": 1, "factor": 0.9, **threshold}
    wanted = rates(theirs(name, "max", **arguments), scores)
    assert rates(ours(name, **arguments), [-score for score in scores]) == wanted
    assert len(set(wanted)) > 3


@pytest.mark.parametrize("name", NAMES)
def test_losses_move_the_rate_as_they_always_have(name: str) -> None:
    rng = Random(1)
    losses = [round(rng.random(), 1) + 0.1 for _ in range(60)]
    arguments = {"patience": 1, "factor": 0.9, "threshold_mode": "rel", "threshold": 1e-3}
    assert rates(ours(name, **arguments), losses) == rates(theirs(name, "min", **arguments), losses)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("score", [0.5, -0.5, 0.0])
def test_a_score_that_stays_is_not_better(name: str, score: float) -> None:
    """It was: the rate never fell. Judges may give negative scores, too."""
    arguments = {"patience": 1, "factor": 0.5, "threshold_mode": "rel", "threshold": 1e-4}
    found = rates(ours(name, **arguments), [-score] * 4)
    assert found == [1e-2, 1e-2, 5e-3, 5e-3]
