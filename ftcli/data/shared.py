"""Rows that begin with the same tokens in one document: the beginning once, and the rest of each row as a branch of it.

A branch sees the beginning and itself, at the positions that its tokens have in the row. So every hidden state is that
of the row by itself, and the beginning, such as the prompt of a pair of answers, is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ftcli.data.tokens import Ints, TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.plan.batches import Batches

#: Two rows, in turn.
Pair = tuple[TokenizedRow, TokenizedRow]


def shared_beginning(pair: Pair) -> int:
    """How many tokens both rows begin with; one of each is left.

    These are tokens, not a prompt: where prompt and answer merge at their border, less is shared, and where both
    answers begin alike, more.
    """
    one, other = (np.asarray(row.input_ids) for row in pair)
    most = min(len(one), len(other)) - 1
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if len(differ) else most


def lengths_once(rows: Sequence[TokenizedRow]) -> Ints:
    """The tokens of each row, of every second one without those that it shares with the one before."""
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    lengths[1::2] -= [shared_beginning((rows[index], rows[index + 1])) for index in range(0, len(rows), 2)]
    return lengths


def shared_batch(
    pairs: Sequence[Pair], batches: Batches, pad_token_id: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Pairs one after the other in a row, and where the tokens that bear loss are predicted.

    Returns:
        ``input_ids`` and ``position_ids`` of shape (1, S), int64, ``document_starts`` and ``branch_starts`` (1, S),
        int32: where the document of a token begins, and its branch. What fills the row up is a document, too.
        Then, for the labels of all rows in turn, (R,) int64 each: the position in the row that predicts it, and the
        token. What both rows begin with predicts for each of them, so a position can be there twice.
    """
    batch, places = branched_batch(pairs, batches, pad_token_id)
    positions: list[int] = []
    targets: list[int] = []
    for tokens, at in zip((tokens for pair in pairs for tokens in pair), places, strict=True):
        scored = [t for t in range(1, len(tokens.labels)) if tokens.labels[t] != IGNORE_INDEX]
        positions += [at[t - 1] for t in scored]
        targets += [tokens.labels[t] for t in scored]
    return batch, torch.tensor(positions, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)


def branched_batch(
    pairs: Sequence[Pair], batches: Batches, pad_token_id: int
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The first part of what :func:`shared_batch` returns; and where the tokens of each row in turn lie."""
    row = _Row()
    places = [at for pair in pairs for at in row.add(pair)]
    _, width = batches.shape([len(row.ids)])
    row.fill(width, pad_token_id, longest=max(len(tokens.input_ids) for pair in pairs for tokens in pair))
    batch = {"input_ids": torch.tensor([row.ids]), "position_ids": torch.tensor([row.positions])}
    batch["document_starts"] = torch.tensor([row.documents], dtype=torch.int32)
    batch["branch_starts"] = torch.tensor([row.branches], dtype=torch.int32)
    return batch, places


class _Row:
    """A row as it grows: of each token its id, its position, and where its document and its branch begin."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.documents: list[int] = []
        self.branches: list[int] = []

    def add(self, pair: Pair) -> list[list[int]]:
        """Where the tokens of each row of a pair lie."""
        shared = shared_beginning(pair)
        if shared == 0:
            return [self._piece(row.input_ids, 0, len(self.ids)) for row in pair]
        document = len(self.ids)
        trunk = self._piece(pair[0].input_ids[:shared], 0, document)
        return [trunk + self._piece(row.input_ids[shared:], shared, document) for row in pair]

    def fill(self, width: int, pad_token_id: int, *, longest: int) -> None:
        """Documents of ``longest`` tokens at most: scaled rotations may depend on the largest position."""
        while len(self.ids) < width:
            size = min(longest, width - len(self.ids))
            self._piece([pad_token_id] * size, 0, len(self.ids))

    def _piece(self, ids: Sequence[int], first: int, document: int) -> list[int]:
        begin = len(self.ids)
        self.ids += ids
        self.positions += range(first, first + len(ids))
        self.documents += [document] * len(ids)
        self.branches += [begin] * len(ids)
        return list(range(begin, len(self.ids)))
