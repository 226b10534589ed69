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
    """Number of tokens that both rows begin with; one of each is left.

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
    positions: list[Ints] = []
    targets: list[Ints] = []
    for tokens, at in zip((tokens for pair in pairs for tokens in pair), places, strict=True):
        labels = np.asarray(tokens.labels, dtype=np.int64)[1:]
        scored = np.flatnonzero(labels != IGNORE_INDEX)
        positions.append(at[scored])
        targets.append(labels[scored])
    return batch, torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(targets))


def branched_batch(pairs: Sequence[Pair], batches: Batches, pad_token_id: int) -> tuple[dict[str, Tensor], list[Ints]]:
    """The first part of what :func:`shared_batch` returns; and where the tokens of each row in turn lie."""
    row = _Row()
    places = [at for pair in pairs for at in row.add(pair)]
    _, width = batches.shape([row.length])
    row.fill(width, pad_token_id, longest=max(len(tokens.input_ids) for pair in pairs for tokens in pair))
    return row.batch(), places


class _Row:
    """A row as it grows: of each token its id, its position, and where its document and its branch begin."""

    def __init__(self) -> None:
        self.length = 0
        self._ids: list[Ints] = []
        self._positions: list[Ints] = []
        self._pieces: list[tuple[int, int, int]] = []  # where the document begins, where the branch does, tokens

    def add(self, pair: Pair) -> list[Ints]:
        """Adds a pair; the places of the tokens of each of its rows."""
        shared = shared_beginning(pair)
        one, other = (np.asarray(row.input_ids, dtype=np.int64) for row in pair)
        if shared == 0:
            return [self._piece(ids, 0, self.length) for ids in (one, other)]
        document = self.length
        trunk = self._piece(one[:shared], 0, document)
        return [np.concatenate([trunk, self._piece(ids[shared:], shared, document)]) for ids in (one, other)]

    def fill(self, width: int, pad_token_id: int, *, longest: int) -> None:
        """Documents of ``longest`` tokens at most: scaled rotations may depend on the largest position."""
        while self.length < width:
            size = min(longest, width - self.length)
            self._piece(np.full(size, pad_token_id, dtype=np.int64), 0, self.length)

    def batch(self) -> dict[str, Tensor]:
        """The layers' inputs."""
        documents, branches, sizes = np.array(self._pieces, dtype=np.int32).T
        return {
            "input_ids": torch.from_numpy(np.concatenate(self._ids))[None],
            "position_ids": torch.from_numpy(np.concatenate(self._positions))[None],
            "document_starts": torch.from_numpy(np.repeat(documents, sizes))[None],
            "branch_starts": torch.from_numpy(np.repeat(branches, sizes))[None],
        }

    def _piece(self, ids: Ints, first: int, document: int) -> Ints:
        begin = self.length
        self._ids.append(ids)
        self._positions.append(np.arange(first, first + len(ids)))
        self._pieces.append((document, begin, len(ids)))
        self.length += len(ids)
        return np.arange(begin, self.length)
