"""The sequences of an epoch, packed or not, and their order: a pure function of data, weights, seed and epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ftcli.data.ledger import DatasetLedger
from ftcli.data.tokens import Ints, TokenizedRow, TokenTable
from ftcli.plain import JsonObject
from ftcli.plan.batches import Batches


@dataclass(frozen=True, slots=True)
class Mixture:
    """Rows of each source in an epoch: ``sizes`` that it has, ``counts`` that are shown, never fewer."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    weighted: bool = False

    @property
    def repeats(self) -> tuple[float, ...]:
        """Mean number of times that an epoch shows each source's rows."""
        return tuple(count / size for count, size in zip(self.counts, self.sizes, strict=True))


def mixture(sizes: Sequence[int], weights: Sequence[float] | None, repeats: Sequence[float] | None = None) -> Mixture:
    """The shortest epoch in which the sources have the shares of ``weights`` and every row is seen at least once; or
    one that shows the rows of each source ``repeats`` times.
    """
    if repeats is not None:
        wanted = [size * times for size, times in zip(sizes, repeats, strict=True)]
    elif weights is None or len(sizes) < 2:
        return Mixture(tuple(sizes), tuple(sizes))
    else:
        total = max(size / weight for size, weight in zip(sizes, weights, strict=True))
        wanted = [total * weight for weight in weights]
    counts = (max(size, round(rows)) for size, rows in zip(sizes, wanted, strict=True))
    return Mixture(tuple(sizes), tuple(counts), weighted=True)


def rows_of(mix: Mixture, generator: torch.Generator) -> list[int]:
    """The rows of one epoch, sources evenly interleaved, each in a random order.

    A source that is seen 2.5 times comes twice whole, then a random half. After any number of rows, each source has had
    its share of them to within one row. With one source this is ``torch.randperm``.
    """
    if len(mix.sizes) == 1 and mix.counts == mix.sizes:
        return [int(i) for i in torch.randperm(mix.sizes[0], generator=generator)]
    rows: list[Ints] = []
    places: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = []
    start = 0
    for size, count in zip(mix.sizes, mix.counts, strict=True):
        rounds = [torch.randperm(size, generator=generator).numpy() for _ in range(-(-count // size))]
        rows.append(np.concatenate(rounds)[:count] + start)
        places.append((np.arange(count) + 0.5) / count)
        start += size
    order = np.argsort(np.concatenate(places), kind="stable")
    return [int(i) for i in np.concatenate(rows)[order]]


#: The key of a stream in a checkpoint's state.
STREAM = "stream"


class Stream(Protocol):
    """What a window of a stream knows of it: :class:`ftcli.train.stream.WindowStream`.

    Attributes:
        number: Of the window.
        first_step: Finished steps when it began.
        passes: Passes over all data that were over then.
        told: Is told what became of all rows so far when a window follows.
    """

    first_step: int
    told: Callable[[Sequence[DatasetLedger]], None]

    @property
    def number(self) -> int: ...

    @property
    def passes(self) -> int: ...

    def following(self, step: int) -> Epochs:
        """The next window, which begins after ``step`` finished steps."""
        ...

    def state(self) -> JsonObject:
        """Where this window began, as JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class Epochs:
    """Training sequences: single rows, or packs of them.

    A pack has the same rows in every epoch; what changes is the order. ``mix`` is over rows without ``packs``, and over
    packs (one source) with them. With ``grouped`` above 1, batches of so many rows of a table are of similar length.
    Of a window of a ``stream`` there is one epoch, that of the window's number.
    """

    sequences: Sequence[TokenizedRow]
    mix: Mixture
    packs: Packs | None = None
    seed: int = 0
    grouped: int = 1
    stream: Stream | None = None

    def __len__(self) -> int:
        return sum(self.mix.counts)

    @property
    def units(self) -> int:
        """Different sequences."""
        return len(self.sequences) if self.packs is None else len(self.packs)

    def members(self, unit: int) -> list[TokenizedRow]:
        """The rows of one sequence."""
        rows = [unit] if self.packs is None else self.packs.members(unit)
        return [self.sequences[row] for row in rows]

    def order(self, epoch: int) -> list[int]:
        """The sequences of an epoch, by their number."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        if self.mix.weighted:
            order = rows_of(self.mix, generator)
        else:
            order = [int(i) for i in torch.randperm(len(self), generator=generator)]
        if self.grouped == 1 or self.packs is not None or not isinstance(self.sequences, TokenTable):
            return order
        return by_length(order, self.sequences.lengths, self.grouped, generator)

    def batches(self, epoch: int, size: int, rank: int = 0, ranks: int = 1) -> list[list[int]]:
        """The sequences of an epoch in batches of ``size``: of several ranks every ``ranks``-th batch, from the
        ``rank``-th on, so that batches computed at the same time are those that one process would take in turn.

        All ranks have the same number of batches: where the epoch has none left, it is the sequence :attr:`units`,
        which does not exist and stands for a batch without labels.
        """
        order = self.order(epoch)
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return [
            batches[turn + rank] if turn + rank < len(batches) else [self.units]
            for turn in range(0, len(batches), ranks)
        ]


#: Rows of similar length are looked for among those of so many batches.
_SPAN = 50


def by_length(order: Sequence[int], lengths: Ints, batch_size: int, generator: torch.Generator) -> list[int]:
    """``order`` with the rows of each batch of similar length.

    Every span of 50 batches (fewer, where there would be fewer than four spans) is sorted by length and cut into
    batches, which then come in random order: short and long ones alternate, and mixtures keep their shares from span
    to span. What fills no batch stays at the end. The batch with the longest row comes first, so that memory runs out
    at once or not at all.
    """
    whole = len(order) - len(order) % batch_size
    span = batch_size * max(1, min(_SPAN, whole // batch_size // 4))
    batches: list[list[int]] = []
    for start in range(0, whole, span):
        rows = np.asarray(order[start : min(start + span, whole)])
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        cut = rows.reshape(-1, batch_size)
        batches += [cut[int(i)].tolist() for i in torch.randperm(len(cut), generator=generator)]
    longest = max(range(len(batches)), key=lambda i: int(lengths[batches[i][0]]), default=0)
    if batches:
        batches[0], batches[longest] = batches[longest], batches[0]
    return [row for batch in batches for row in batch] + list(order[whole:])


def epochs_of(
    table: TokenTable,
    weights: Sequence[float] | None,
    *,
    packing: bool,
    capacity: int,
    seed: int,
    grouped: int = 1,
    repeats: Sequence[float] | None = None,
) -> Epochs:
    """The training sequences of prepared sources.

    Args:
        weights: One for each source, or None to see every row once.
        repeats: How often an epoch shows the rows of each source, in place of weights.
        grouped: Rows of a batch, which are to be of similar length; 1 leaves them in random order.
    """
    sizes = [b - a for a, b in zip(table.starts[:-1], table.starts[1:], strict=True)]
    mix = mixture(sizes, weights, repeats)
    if not packing:
        return Epochs(table, mix, None, seed, grouped)
    repeated = sum(mix.counts) > len(table)
    rows = rows_of(mix, torch.Generator().manual_seed(seed)) if repeated else None
    packs = best_fit(table.lengths, capacity, rows)
    return Epochs(table, Mixture((len(packs),), (len(packs),)), packs, seed)


def plain_epochs(sequences: Sequence[TokenizedRow], seed: int) -> Epochs:
    """Every row once an epoch, one row a sequence."""
    return Epochs(sequences, Mixture((len(sequences),), (len(sequences),)), None, seed)


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Computation of the first epoch: its ``tokens``, the padding, and how many ``shapes`` micro-batches have."""

    tokens: int
    filler: int
    shapes: int

    @property
    def share(self) -> float:
        """The filler's share of all that is computed."""
        return self.filler / max(self.tokens + self.filler, 1)


def computed_by(epochs: Epochs, lengths: Ints, batch_size: int, batches: Batches) -> ComputedTokens:
    """Tokens of the first epoch in micro-batches of ``batch_size`` sequences; ``lengths`` are those of all rows."""
    order = epochs.order(0)
    shapes: dict[tuple[int, int], int] = {}
    tokens = 0
    for start in range(0, len(order), batch_size):
        found = _lengths_of(epochs, order[start : start + batch_size], lengths, batches)
        shape = batches.shape(found)
        shapes[shape] = shapes.get(shape, 0) + 1
        tokens += sum(found)
    computed = sum(rows * width * count for (rows, width), count in shapes.items())
    return ComputedTokens(tokens, computed - tokens, len(shapes))


def _lengths_of(epochs: Epochs, units: Sequence[int], lengths: Ints, batches: Batches) -> list[int]:
    """Lengths of a micro-batch's rows: documents if they are laid out unpadded, else whole sequences."""
    if epochs.packs is None:
        return [int(lengths[unit]) for unit in units]
    members = [[int(lengths[row]) for row in epochs.packs.members(unit)] for unit in units]
    if batches.layout == "unpadded":
        return [length for pack in members for length in pack]
    return [sum(pack) for pack in members]


@dataclass(frozen=True, slots=True)
class Packs:
    """``rows`` holds the rows of all packs one after the other; pack p is ``rows[ends[p - 1] : ends[p]]``."""

    rows: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    def members(self, pack: int) -> list[int]:
        """Rows of one pack."""
        start = int(self.ends[pack - 1]) if pack else 0
        return [int(row) for row in self.rows[start : int(self.ends[pack])]]

    def lengths(self, row_lengths: Ints) -> Ints:
        """Tokens of each pack."""
        running = np.concatenate(([0], row_lengths[self.rows].cumsum()))
        return np.diff(running[np.concatenate(([0], self.ends))])


def best_fit(lengths: Sequence[int] | Ints, capacity: int, rows: Sequence[int] | Ints | None = None) -> Packs:
    """Packs ``rows`` (all of ``lengths`` when None; a row may occur several times) by best-fit decreasing.

    Rows from the longest to the shortest, ties by position; each goes into the fullest pack that still has room, or
    opens a new one. At most 11/9 of the least number of packs, plus one (D. S. Johnson, "Near-optimal bin packing
    algorithms", MIT, 1973). Packs come in the order of their first row in ``rows``, rows in a pack likewise. A pure
    function of its arguments.

    Raises ValueError for a row that is empty or longer than ``capacity``.
    """
    chosen = np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[chosen]
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"rows of {sizes.min()} to {sizes.max()} tokens do not fit packs of {capacity}")
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}  # by the room that is left
    rooms = 0  # bit r is set when a pack with room r is open: the smallest room that is enough is one shift away
    for position in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[position])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            pack = open_packs[room].pop()
            if not open_packs[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(position)
        left = room - size
        if left:
            open_packs.setdefault(left, []).append(pack)
            rooms |= 1 << left
    members = sorted(sorted(pack) for pack in packs)
    flat = np.fromiter((position for pack in members for position in pack), dtype=np.int64, count=len(sizes))
    return Packs(chosen[flat], np.cumsum([len(pack) for pack in members], dtype=np.int64))
