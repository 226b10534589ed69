"""Which sequences an epoch holds and in which order: a pure function of data, weights, seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Sampler

from ftcli.data.pack import Packs, best_fit
from ftcli.data.tokens import Ints, TokenizedRow, TokenTable
from ftcli.facts.batches import Batches


@dataclass(frozen=True, slots=True)
class Mixture:
    """How often an epoch shows each source: ``sizes`` rows that it has, ``counts`` that are shown, never fewer."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    weighted: bool = False

    @property
    def repeats(self) -> tuple[float, ...]:
        """How often each source's rows are seen in an epoch, on average."""
        return tuple(count / size for count, size in zip(self.counts, self.sizes, strict=True))


def mixture(sizes: Sequence[int], weights: Sequence[float] | None) -> Mixture:
    """The shortest epoch in which the sources have the shares of ``weights`` and every row is seen at least once."""
    if weights is None or len(sizes) < 2:
        return Mixture(tuple(sizes), tuple(sizes))
    total = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    counts = (max(size, round(total * weight)) for size, weight in zip(sizes, weights, strict=True))
    return Mixture(tuple(sizes), tuple(counts), weighted=True)


def rows_of(mix: Mixture, generator: torch.Generator) -> list[int]:
    """The rows of one epoch, sources evenly interleaved, each in a random order.

    A source that is seen 2.5 times comes twice whole, then a random half. After any number of rows, each source has had
    its share of them to within one row. With one source this is ``torch.randperm``.
    """
    if len(mix.sizes) == 1:
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


@dataclass(frozen=True, slots=True)
class Epochs:
    """Training sequences: single rows, or packs of them.

    A pack has the same rows in every epoch; what changes is the order. ``mix`` is over rows without ``packs``, and over
    packs (one source) with them. With ``grouped`` above 1, batches of so many rows of a table are of similar length.
    """

    sequences: Sequence[TokenizedRow]
    mix: Mixture
    packs: Packs | None = None
    seed: int = 0
    grouped: int = 1

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
    table: TokenTable, weights: Sequence[float] | None, *, packing: bool, capacity: int, seed: int, grouped: int = 1
) -> Epochs:
    """The training sequences of prepared sources.

    Args:
        weights: One for each source, or None to see every row once.
        capacity: Longest sequence, in tokens.
        grouped: Rows of a batch, which are to be of similar length; 1 leaves them in random order.
    """
    sizes = [b - a for a, b in zip(table.starts[:-1], table.starts[1:], strict=True)]
    mix = mixture(sizes, weights)
    if not packing:
        return Epochs(table, mix, None, seed, grouped)
    repeated = sum(mix.counts) > len(table)
    rows = rows_of(mix, torch.Generator().manual_seed(seed)) if repeated else None
    packs = best_fit(table.lengths, capacity, rows)
    return Epochs(table, Mixture((len(packs),), (len(packs),)), packs, seed)


def plain_epochs(sequences: Sequence[TokenizedRow], seed: int) -> Epochs:
    """Every row once an epoch, one row a sequence."""
    return Epochs(sequences, Mixture((len(sequences),), (len(sequences),)), None, seed)


class EpochSampler(Sampler[int]):
    """Gives the trainer the order of each epoch; ``set_epoch`` is called by transformers before each."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration gives."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[int]:
        return iter(self._epochs.order(self._epoch))


class RankSampler(EpochSampler):
    """The share of one of ``size`` ranks: of the epoch's batches every ``size``-th, from the ``rank``-th on.

    So the batches that are computed at the same time are those that one process would take one after the other. All
    ranks have the same number: where the epoch has no batch left, it is the sequence :attr:`Epochs.units`, which there
    is not; the collator makes a batch without labels of it.
    """

    def __init__(self, epochs: Epochs, batch_size: int, rank: int, size: int) -> None:
        super().__init__(epochs)
        self._batch_size, self._rank, self._size = batch_size, rank, size

    def __len__(self) -> int:
        batches = -(-len(self._epochs) // self._batch_size)
        turns = -(-batches // self._size)
        last = (turns - 1) * self._size + self._rank
        left = max(len(self._epochs) - last * self._batch_size, 0)
        return (turns - 1) * self._batch_size + (min(left, self._batch_size) or 1)

    def __iter__(self) -> Iterator[int]:
        order, size = self._epochs.order(self._epoch), self._batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        for turn in range(0, len(batches), self._size):
            mine = turn + self._rank
            yield from batches[mine] if mine < len(batches) else [self._epochs.units]


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """What the first epoch computes: its ``tokens``, what fills rows up, and how many ``shapes`` micro-batches have."""

    tokens: int
    filler: int
    shapes: int

    @property
    def share(self) -> float:
        """The filler's share of all that is computed."""
        return self.filler / max(self.tokens + self.filler, 1)


def computed_by(epochs: Epochs, lengths: Ints, batch_size: int, batches: Batches) -> ComputedTokens:
    """What the first epoch computes in micro-batches of ``batch_size`` sequences; ``lengths`` are those of all rows."""
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
    """Of the rows of a micro-batch: documents where they are laid out unpadded, else whole sequences."""
    if epochs.packs is None:
        return [int(lengths[unit]) for unit in units]
    members = [[int(lengths[row]) for row in epochs.packs.members(unit)] for unit in units]
    if batches.layout == "unpadded":
        return [length for pack in members for length in pack]
    return [sum(pack) for pack in members]
