"""Pairs whose common beginning is laid out once: every token at its position, every target after what predicts it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ftcli.data.collate import Pair, lengths_once, shared_batch, shared_beginning
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row

SHARED = Batches("unpadded", "a test", shares_prompts=True)
_ROW = Row("d", 1, {})


def row(ids: Sequence[int], scored: Sequence[int]) -> TokenizedRow:
    """``scored``: indices of the tokens that bear loss."""
    return TokenizedRow(_ROW, list(ids), [token if i in scored else IGNORE_INDEX for i, token in enumerate(ids)])


def pair(one: Sequence[int], other: Sequence[int], prompt: int) -> Pair:
    return row(one, range(prompt, len(one))), row(other, range(prompt, len(other)))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        ([1, 2, 3, 4], [1, 2, 5], 2),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2], [1, 2, 3, 4], 1),  # one token is left of each
        ([1], [1, 2], 0),
        ([1, 2, 3], [1, 2, 3], 2),
    ],
)
def test_what_two_rows_begin_with(one: list[int], other: list[int], shared: int) -> None:
    assert shared_beginning(pair(one, other, 1)) == shared


def test_the_layout_of_two_pairs() -> None:
    pairs = [pair([10, 11, 12, 13], [10, 11, 14], 2), pair([20, 21], [30, 31, 32], 1)]
    batch, positions, targets = shared_batch(pairs, SHARED, 7)
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(batch, (1, 64))
    assert {name: tensor[0, :10].tolist() for name, tensor in batch.items()} == {
        "input_ids": [10, 11, 12, 13, 14, 20, 21, 30, 31, 32],
        "position_ids": [0, 1, 2, 3, 2, 0, 1, 0, 1, 2],
        "document_starts": [0, 0, 0, 0, 0, 5, 5, 7, 7, 7],
        "branch_starts": [0, 0, 2, 2, 4, 5, 5, 7, 7, 7],
    }
    # Both first tokens come from the prompt's last position.
    assert positions.tolist() == [1, 2, 1, 5, 7, 8]
    assert targets.tolist() == [12, 13, 14, 21, 31, 32]
    assert (batch["input_ids"][0, 10:] == 7).all()
    assert int(batch["position_ids"].max()) == 3  # no larger than in a row
    assert (batch["document_starts"].dtype, batch["branch_starts"].dtype) == (torch.int32, torch.int32)
    assert lengths_once([each for both in pairs for each in both]).tolist() == [4, 1, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_each_row_is_found_again(seed: int) -> None:
    """Following trunk and branch gives the row, its positions, and each target after the token before it."""
    generator = torch.Generator().manual_seed(seed)

    def some(low: int, high: int) -> list[int]:
        size = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(3, 9, (size,), generator=generator).tolist()

    pairs = []
    for _ in range(4):
        prompt = some(0, 6)
        rows = []
        for _ in range(2):
            ids = prompt + some(1, 8)
            marked = torch.rand(len(ids), generator=generator) < 0.6
            rows.append(row(ids, torch.nonzero(marked).flatten().tolist()))
        pairs.append((rows[0], rows[1]))
    batch, positions, targets = shared_batch(pairs, SHARED, 0)
    ids, places, documents, branches = (batch[name][0].tolist() for name in batch)
    expected = []
    for end, both in zip(_ends(pairs), pairs, strict=True):
        shared = shared_beginning(both)
        for tokens, last in zip(both, end, strict=True):
            own = range(last - (len(tokens.input_ids) - shared), last)
            path = [*range(documents[last - 1], documents[last - 1] + shared), *own]
            assert [ids[at] for at in path] == tokens.input_ids
            assert [places[at] for at in path] == list(range(len(path)))
            assert {branches[at] for at in own} == {own[0]}
            expected += [(path[t - 1], label) for t, label in enumerate(tokens.labels) if t and label != IGNORE_INDEX]
    assert list(zip(positions.tolist(), targets.tolist(), strict=True)) == expected
    assert int(positions.bincount().max()) <= 2


def _ends(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    """Where the rows of each pair end."""
    found, at = [], 0
    for one, other in pairs:
        first = at + len(one.input_ids)
        at = first + len(other.input_ids) - shared_beginning((one, other))
        found.append((first, at))
    return found
