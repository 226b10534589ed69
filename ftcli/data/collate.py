"""Makes batches: rows padded to the longest, or documents one after the other, with positions of their own.

Rows that begin with the same tokens share one document: the beginning once, and the rest of each row as a branch of it.
A branch sees the beginning and itself, at the positions that its tokens have in the row. So every hidden state is that
of the row by itself, and the beginning, such as the prompt of a pair of answers, is computed once.

Where several ranks share each row, each takes its part of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.pixels import PixelReader
from ftcli.data.tokens import Ints, TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.plan.batches import FEW_UP_TO, Batches, unpadded_shape


def padded_batch(rows: Sequence[TokenizedRow], pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` of shape (batch, longest), int64, padded on the right.

    Rows keep an attention mask of their own, so the pad token's id never matters and may equal eos.
    """
    longest = max(len(row.input_ids) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), longest), pad_token_id, dtype=torch.int64),
        "attention_mask": torch.zeros((len(rows), longest), dtype=torch.int64),
        "labels": torch.full((len(rows), longest), IGNORE_INDEX, dtype=torch.int64),
    }
    for index, row in enumerate(rows):
        length = len(row.input_ids)
        batch["input_ids"][index, :length] = _tensor(row.input_ids)
        batch["attention_mask"][index, :length] = 1
        batch["labels"][index, :length] = _tensor(row.labels)
    return batch


def packed_batch(
    packs: Sequence[Sequence[TokenizedRow]], pad_token_id: int, *, width: int | None = None
) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` and ``position_ids`` of shape (packs, width), ``lengths`` (packs,), all int64, and
    ``document_starts`` (packs, width), int32: where in its row the document of a token begins.

    Positions begin anew with each document. What fills a row up are documents too, without labels, and none longer
    than the longest of the others: scaled rotations may depend on the largest position. The first token of a document
    is never a label: what stands before it is another document's last token.

    Args:
        width: Tokens of a row; the longest pack's when None.
    """
    lengths = [sum(len(tokens.input_ids) for tokens in pack) for pack in packs]
    longest = max(len(tokens.input_ids) for pack in packs for tokens in pack)
    shape = (len(packs), max(lengths) if width is None else width)
    batch = {
        "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
        "lengths": torch.tensor(lengths, dtype=torch.int64),
    }
    for index, pack in enumerate(packs):
        start = 0
        for tokens in pack:
            end = start + len(tokens.input_ids)
            batch["input_ids"][index, start:end] = _tensor(tokens.input_ids)
            batch["labels"][index, start + 1 : end] = _tensor(tokens.labels[1:])
            batch["position_ids"][index, start:end] = torch.arange(end - start)
            start = end
        batch["position_ids"][index, start:] = torch.arange(shape[1] - start) % longest
    batch["document_starts"] = (torch.arange(shape[1]) - batch["position_ids"]).to(torch.int32)
    return batch


def unpadded_batch(
    documents: Sequence[TokenizedRow], pad_token_id: int, few_up_to: int = FEW_UP_TO
) -> dict[str, Tensor]:
    """``documents`` in their :func:`unpadded_shape`: one row of all of them, or each a row of its own.

    The keys are those of :func:`packed_batch`. Rows of their own are whole where ``document_starts`` is a single zero;
    they need neither that nor ``position_ids`` where nothing is filled up and nothing seen, whose positions are others.
    """
    sizes = [len(tokens.input_ids) for tokens in documents]
    rows, width = unpadded_shape(sizes, few_up_to)
    if rows != len(documents):
        return packed_batch([documents], pad_token_id, width=width)
    batch = {
        "input_ids": torch.full((rows, width), pad_token_id, dtype=torch.int64),
        "labels": torch.full((rows, width), IGNORE_INDEX, dtype=torch.int64),
        "lengths": torch.tensor(sizes, dtype=torch.int64),
    }
    for index, tokens in enumerate(documents):
        batch["input_ids"][index, : sizes[0]] = _tensor(tokens.input_ids)
        batch["labels"][index, 1 : sizes[0]] = _tensor(tokens.labels[1:])
    if width > sizes[0] or any(tokens.images for tokens in documents):
        # Nothing supervised sees what follows; its position must not be a larger one.
        batch["position_ids"] = torch.arange(width).clamp(max=sizes[0] - 1)[None]
        batch["document_starts"] = torch.zeros((1, 1), dtype=torch.int32)
    return batch


def _tensor(ids: Sequence[int]) -> Tensor:
    """As int64. torch takes ten times as long to look at each number of a list."""
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))


def documents_batch(documents: Sequence[TokenizedRow], batches: Batches, pad_token_id: int) -> dict[str, Tensor]:
    """``input_ids`` and ``labels`` of documents that are scored, and what else says how they are laid out.

    Padded on the right they need no mask: under causal attention nothing that is scored sees the padding.
    """
    if batches.layout == "unpadded":
        batch, left_out = unpadded_batch(documents, pad_token_id, batches.few_up_to), "lengths"
    else:
        batch, left_out = padded_batch(documents, pad_token_id), "attention_mask"
    return {name: value for name, value in batch.items() if name != left_out}


@dataclass(frozen=True, slots=True)
class EpochCollator:
    """Turns numbers of training sequences (``{"index": 3}``) into batches. ``pixels``: where rows may have images."""

    epochs: Epochs
    pad_token_id: int
    batches: Batches
    pixels: PixelReader | None = None

    def __call__(self, units: Sequence[int]) -> dict[str, Tensor]:
        members = [self.epochs.members(unit) for unit in units]
        if self.batches.layout == "unpadded":
            documents = [tokens for pack in members for tokens in pack]
            batch = unpadded_batch(documents, self.pad_token_id, self.batches.few_up_to)
            return with_images(batch, [documents], self.pixels)
        if self.epochs.packs is not None:
            return with_images(packed_batch(members, self.pad_token_id), members, self.pixels)
        return with_images(padded_batch([row for (row,) in members], self.pad_token_id), members, self.pixels)


#: Where a batch holds the places of what the tower saw, counted through all its rows; positions of three numbers; and
#: for each token the end of the tokens that it sees ahead.
IMAGE_PLACES, ROPE_POSITIONS, BLOCK_ENDS = "image_places", "rope_positions", "block_ends"


def with_images(
    batch: dict[str, Tensor], rows: Sequence[Sequence[TokenizedRow]], pixels: PixelReader | None
) -> dict[str, Tensor]:
    """A batch of these rows of documents with what their images bring; as it is, where they have none.

    Adds ``image_places`` (N,), int64; the tensors of the image processor; ``position_ids`` where there are none; and,
    where the family has them, ``rope_positions`` (3, B, S), int64, which begin anew with each document, or
    ``block_ends`` (B, S), int32.

    Raises FtcliError FT416 (exit 4).
    """
    documents = [tokens for row in rows for tokens in row]
    if pixels is None or not any(tokens.images for tokens in documents):
        return batch
    shape = batch["input_ids"].shape
    if len(rows) == 1 and shape[0] == len(documents):
        rows = [[tokens] for tokens in documents]
    vision, width = pixels.vision, shape[1]
    positions = batch.setdefault("position_ids", torch.arange(width)[None])
    three = positions.expand(shape).clone().expand(3, *shape).clone()
    ends = torch.arange(1, width + 1, dtype=torch.int32).repeat(shape[0], 1)
    places: list[Ints] = []
    for number, row in enumerate(rows):
        start = 0
        for tokens in row:
            end = start + len(tokens.input_ids)
            places.append(vision.seen_at(tokens) + number * width + start)
            if vision.kind.three_rows:
                three[:, number, start:end] = torch.from_numpy(vision.positions(tokens))
            if vision.both_ways:
                ends[number, start:end] = torch.from_numpy(vision.block_ends(tokens) + start)
            start = end
    more = {ROPE_POSITIONS: three} if vision.kind.three_rows else {}
    more |= {BLOCK_ENDS: ends} if vision.both_ways else {}
    return {**batch, IMAGE_PLACES: torch.from_numpy(np.concatenate(places)), **more, **pixels.of(documents)}


def part_of(batch: Mapping[str, Tensor], part: int, parts: int) -> dict[str, Tensor]:
    """Part number ``part`` of ``parts`` equal ones of every row of a batch that :mod:`ftcli.data.collate` made.

    Returns:
        ``input_ids`` and ``targets`` (B, S / parts) int64, the target of a token being the label of the next one, which
        may lie in another part, -100 for none; ``position_ids`` (B or 1, S / parts), those of whole rows;
        ``document_starts`` of whole rows, as they came or (1, 1), a zero; ``lengths`` (B,), this part's tokens that
        fill nothing up, where the batch tells them. Rows whose length is not a multiple of ``parts`` are filled up at
        their end.
    """
    ids = batch["input_ids"]
    width = -(-ids.shape[1] // parts)
    more = parts * width - ids.shape[1]
    here = slice(part * width, (part + 1) * width)
    targets = F.pad(batch["labels"][:, 1:], (0, 1 + more), value=IGNORE_INDEX)
    found = {
        "input_ids": F.pad(ids, (0, more))[:, here].contiguous(),
        "targets": targets[:, here].contiguous(),
        "position_ids": _positions(batch, more)[:, here].contiguous(),
        "document_starts": _starts(batch, more),
    }
    if "attention_mask" in batch:
        found["lengths"] = batch["attention_mask"][:, here].sum(1)
    elif "lengths" in batch:
        found["lengths"] = (batch["lengths"] - here.start).clamp(0, width)
    return found


def _positions(batch: Mapping[str, Tensor], more: int) -> Tensor:
    """Positions of whole rows. Padding repeats the last position: rotation may depend on the largest."""
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(batch["input_ids"].shape[1])[None]
    return torch.cat([positions, positions[:, -1:].expand(-1, more)], dim=1)


def _starts(batch: Mapping[str, Tensor], more: int) -> Tensor:
    """Document starts of whole rows. Padding belongs to the last document, which does not attend to it."""
    starts = batch.get("document_starts")
    if starts is None:
        return torch.zeros((1, 1), dtype=torch.int32)
    return starts if starts.shape[-1] == 1 else torch.cat([starts, starts[:, -1:].expand(-1, more)], dim=1)


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
