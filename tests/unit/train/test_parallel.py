"""What ranks draw, and what they hold against each other before a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftcli.errors import FtcliError
from ftcli.train.parallel import MicroBatch, Parallel, TokenCounts, float_bits


class Group:
    """Rank ``rank`` of two; of the other one is known what it said last, but for its gradient norm."""

    size = 2

    def __init__(self, rank: int, other_norm: float = 1.0) -> None:
        self.rank, self._other_norm = rank, other_norm

    def agree(self, what: str, numbers: list[int]) -> list[list[int]]:
        return [numbers, [float_bits(self._other_norm), *numbers[1:]]]


def parallel(group: Any) -> Parallel:
    model: Any = torch.nn.Linear(2, 2)
    return Parallel(group, model, seed=3, batch_size=1)


def test_what_is_drawn_depends_on_step_and_rank_alone() -> None:
    def drawn(rank: int, step: int) -> float:
        parallel(Group(rank)).seed(step)
        return float(torch.rand(()))

    assert drawn(0, 5) == drawn(0, 5)
    assert len({drawn(rank, step) for rank in range(2) for step in range(4)}) == 8


@pytest.mark.parametrize(("other", "alike"), [(1.0, True), (1.0 + 1e-5, True), (1.1, False)])
def test_ranks_with_other_gradient_norms_do_not_go_on(other: float, alike: bool) -> None:
    batches = [MicroBatch({}, (0,), TokenCounts(3, 4, 5))]
    ranks = parallel(Group(0, other))
    if alike:
        assert ranks.begin_step(batches, 1.0).counts == TokenCounts(6, 8, 10)
        return
    with pytest.raises(FtcliError) as raised:
        ranks.begin_step(batches, 1.0)
    assert raised.value.findings[0].code == "FT711"


def test_norms_of_steps_that_ranks_made_apart_are_not_held_against_each_other() -> None:
    batches = [MicroBatch({}, (0,), TokenCounts(3, 4, 5))]
    ranks = parallel(Group(0, 1.1))
    ranks.reduces = False
    ranks.begin_step(batches, 1.0)
    ranks.reduces = True
    for _ in range(2):
        ranks.begin_step(batches, 1.0)
    with pytest.raises(FtcliError, match="FT711"):
        ranks.begin_step(batches, 1.0)
