"""The ranks' shares of an epoch are its batches, each once, in the order of one process."""

from __future__ import annotations

import pytest

from ftcli.data.order import EpochSampler, RankSampler, plain_epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.rows.row import Row


def _batches(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_ranks_batches_laid_side_by_side_are_the_epochs(ranks: int, size: int) -> None:
    for rows in (1, 7, 8, 9, 12, 40):
        epochs = plain_epochs([TokenizedRow(Row("r", i, {}), [1], [1]) for i in range(rows)], seed=5)
        whole = EpochSampler(epochs)
        shares = [RankSampler(epochs, size, rank, ranks) for rank in range(ranks)]
        for sampler in (whole, *shares):
            sampler.set_epoch(2)
        found = [_batches(list(share), size) for share in shares]
        assert [len(list(share)) for share in shares] == [len(share) for share in shares]
        assert len({len(batches) for batches in found}) == 1
        turns = [found[rank][turn] for turn in range(len(found[0])) for rank in range(ranks)]
        wanted = _batches(list(whole), size)
        assert turns[: len(wanted)] == wanted
        assert all(batch == [rows] for batch in turns[len(wanted) :])
