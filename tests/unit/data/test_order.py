"""The ranks' shares of an epoch are its batches, each once, in the order of one process."""

from __future__ import annotations

import pytest

from ftcli.data.order import plain_epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.rows.row import Row


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_ranks_batches_laid_side_by_side_are_the_epochs(ranks: int, size: int) -> None:
    for rows in (1, 7, 8, 9, 12, 40):
        epochs = plain_epochs([TokenizedRow(Row("r", i, {}), [1], [1]) for i in range(rows)], seed=5)
        found = [epochs.batches(2, size, rank, ranks) for rank in range(ranks)]
        assert len({len(batches) for batches in found}) == 1
        turns = [found[rank][turn] for turn in range(len(found[0])) for rank in range(ranks)]
        wanted = epochs.batches(2, size)
        assert [row for batch in wanted for row in batch] == epochs.order(2)
        assert turns[: len(wanted)] == wanted
        assert all(batch == [rows] for batch in turns[len(wanted) :])
