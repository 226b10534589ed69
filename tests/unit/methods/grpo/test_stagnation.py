"""When GRPO ends before its last step."""

from __future__ import annotations

import json
import math

import pytest

from ftcli.methods.grpo.rewards import Stagnation
from ftcli.methods.grpo.settings import GrpoStoppingConfig

PLATEAU = GrpoStoppingConfig.model_validate({"reward": {"window": 2, "patience": 2, "min_delta": 0.05}})
COLLAPSE = GrpoStoppingConfig.model_validate({"entropy": {"min_entropy": 0.1, "patience": 3}})


def first_end(stops: Stagnation, rewards: list[float] | None = None, entropies: list[float] | None = None) -> int:
    """The step after which ``stops`` has a reason; 0: none has one."""
    count = len(rewards or entropies or [])
    for step in range(1, count + 1):
        stops.note(step, [rewards[step - 1]] if rewards else [], [entropies[step - 1]] if entropies else [])
        if stops.reason is not None:
            return step
    return 0


@pytest.mark.parametrize(
    ("rewards", "end"),
    [
        ([0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4], 0),  # rises
        ([0.5] * 8, 6),  # a first measurement, and two that are no better
        ([0.1, 0.9, 0.5, 0.5, 0.4, 0.6], 6),  # means count, not single rollouts
        ([0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], 10),  # a rise begins the count anew
        ([0.5, 0.5, 0.52, 0.52, 0.54, 0.54], 6),  # rises by less than what counts
        ([0.5, math.nan, 0.5, 0.5, math.nan, 0.5, 0.5, 0.5], 8),  # a rollout that nobody could score is none
    ],
)
def test_a_plateau_of_rewards(rewards: list[float], end: int) -> None:
    stops = Stagnation(PLATEAU)
    assert first_end(stops, rewards) == end
    assert not end or "has not risen by more than 0.05 in 2 measurements" in str(stops.reason)


@pytest.mark.parametrize(
    ("entropies", "end"), [([0.05] * 5, 3), ([0.05, 0.05, 0.2, 0.05, 0.05, 0.05], 6), ([0.1] * 9, 0)]
)
def test_an_entropy_that_has_collapsed(entropies: list[float], end: int) -> None:
    stops = Stagnation(COLLAPSE)
    assert first_end(stops, entropies=entropies) == end
    assert not end or "entropy was below 0.1 nats a token in 3 steps in a row, 0.05 in the last" in str(stops.reason)


def test_a_step_in_which_nothing_was_trained_on_says_nothing_of_entropy() -> None:
    stops = Stagnation(COLLAPSE)
    for step in range(9):
        stops.note(step, [0.5], [])
    assert stops.reason is None


def test_nothing_is_looked_for_unasked() -> None:
    stops = Stagnation(None)
    assert first_end(stops, [0.0] * 99) == 0
    assert first_end(Stagnation(GrpoStoppingConfig()), [0.0] * 99) == 0


def test_it_goes_on_from_a_checkpoint() -> None:
    rewards = [0.5, 0.5, 0.7, 0.7, 0.7, 0.6, 0.7, 0.7]
    assert first_end(Stagnation(PLATEAU), rewards) == 8
    for cut in range(1, 8):
        first, second = Stagnation(PLATEAU), Stagnation(PLATEAU)
        first_end(first, rewards[:cut])
        second.restore(json.loads(json.dumps(first.state())))
        assert first_end(second, rewards[cut:]) == 8 - cut
