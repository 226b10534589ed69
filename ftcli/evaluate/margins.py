"""Held-out pairs or labelled answers one by one: margins by length and by source, and the rows that are most wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ftcli.labels import IGNORE_INDEX
from ftcli.plain import JsonObject, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ftcli.data.tokens import TokenizedRow
    from ftcli.run.process_group import RankGroup

Floats: TypeAlias = NDArray[np.float64]

#: Rows whose margins are kept for drawing, evenly taken of all; rows shown with their text, and how much of it.
KEPT_ROWS, WORST_ROWS, SHOWN_CHARACTERS = 2000, 8, 2000
#: Sources that are told apart.
_MOST_SOURCES = 50
#: By which share of the shorter answer the longer one is longer at most, of each class but the last.
_LONGER = (0.1, 0.5, 1.0)
_TIMES = ("1.1 to 1.5 times as long", "1.5 to 2 times as long", "over twice as long")
#: Of :func:`_classes`, from -3 (the rejected answer is far longer) to 3 (the chosen one is).
LENGTH_CLASSES = (
    *(f"rejected {times}" for times in reversed(_TIMES)),
    "within 10%",
    *(f"chosen {times}" for times in _TIMES),
)
_MIDDLE = len(_LONGER)


class RowTable:
    """Numbers of each held-out row, which whichever rank measures the row fills in.

    Args:
        rows, columns: Its shape; what nobody fills in is NaN.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._values = torch.full((rows, columns), torch.nan, dtype=torch.float64)

    def fill(self, rows: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Fills in ``columns`` (R,) each. The first numbers of a row stay: ranks without a batch of their own repeat
        some other row.
        """
        found = torch.stack([column.detach().double().cpu() for column in columns], 1)
        there = self._values[list(rows)]
        self._values[list(rows)] = torch.where(there.isnan(), found, there)

    def gathered(self, group: RankGroup | None, batch_size: int) -> Floats:
        """The rows of all ranks, which have taken batches in turn (:func:`rank_batches`). All ranks call it."""
        if group is None:
            return self._values.numpy()
        with group.exchanging():
            of_all = torch.stack(group.all_gather(self._values))
        rows = torch.arange(len(self._values))
        return of_all[rows // batch_size % group.size, rows].numpy()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of a text, and how many characters are left out."""

    text: str
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class WrongRow:
    """A pair whose rejected answer is still preferred, or an answer on the wrong side, with its texts.

    ``rejected`` is None for a single answer, whose ``label`` is 1 (desirable) or -1.
    """

    origin: str
    margin: float
    prompt: Excerpt
    chosen: Excerpt
    rejected: Excerpt | None = None
    label: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Margins:
    """Margins of all held-out rows.

    Attributes:
        values: (N,) by how much the chosen answer of a pair is ahead; of a labelled answer its reward, which counts the
            other way round for an undesirable one.
        lengths: Tokens, (N, 2) of chosen and rejected answers, (N, 1) of labelled ones.
        labels: (N,) 1 or -1 of labelled answers; None of pairs.
        sources: Name of each row's source.
        worst: Rows on the wrong side, the worst first.
    """

    kind: Literal["pairs", "answers"]
    values: Floats
    lengths: Floats
    labels: Floats | None
    sources: Sequence[str]
    worst: tuple[WrongRow, ...]

    @property
    def sides(self) -> Floats:
        """(N,) above 0 for rows on the right side."""
        return self.values if self.labels is None else self.values * self.labels

    def as_dict(self) -> JsonObject:
        """The classes of length, for an evaluation's answer."""
        return {"by_length": self.by_length()} if self.kind == "pairs" else {}

    def by_length(self) -> list[JsonObject]:
        """Each class of length that has pairs: ``length``, ``pairs``, ``accuracy``, and the mean ``margin``."""
        if self.kind != "pairs":
            return []
        classes = _classes(self.lengths)
        of = {name: classes == number for number, name in enumerate(LENGTH_CLASSES, -_MIDDLE)}
        return [self._part("length", name, "pairs", rows) for name, rows in of.items() if rows.any()]

    def by_source(self) -> list[JsonObject]:
        """Each of the first sources, where there are several: ``source``, ``rows``, ``accuracy`` and ``margin``."""
        number = {name: place for place, name in enumerate(dict.fromkeys(self.sources))}
        if len(number) < 2:
            return []
        places = np.array([number[name] for name in self.sources])
        return [self._part("source", name, "rows", places == number[name]) for name in list(number)[:_MOST_SOURCES]]

    def _part(self, kind: str, name: str, unit: str, of: NDArray[np.bool_]) -> JsonObject:
        sides = self.sides[of]
        return {kind: name, unit: len(sides), "accuracy": float(_right(sides).mean()), "margin": float(sides.mean())}

    def record(self) -> JsonObject:
        """Their part of margins.json, of bounded size."""
        count = len(self.values)
        kept = np.arange(min(count, KEPT_ROWS)) * count // max(min(count, KEPT_ROWS), 1)
        pairs = self.kind == "pairs"
        lengths = self.lengths[:, 0] - self.lengths[:, 1] if pairs else self.lengths[:, 0]
        found = {
            "kind": self.kind,
            "rows": count,
            "wrong": int((self.sides < 0).sum()),
            "margins": [float(f"{value:.6g}") for value in self.values[kept]],
            "lengths": [int(value) for value in lengths[kept]],
            "by_length": self.by_length(),
            "by_source": self.by_source(),
            "worst": self.worst,
        }
        if self.labels is not None:
            found["labels"] = [int(value) for value in self.labels[kept]]
        return {name: plain(value) for name, value in found.items()}


def length_controlled(values: Floats, lengths: Floats) -> float | None:
    """The accuracy with length balanced: of each class of difference in length, pairs whose chosen answer is longer
    count as much as those whose rejected one is. What goes by length alone has one half.

    Pairs of a class without a counterpart are left out; None where no pair is left.
    """
    classes, right = _classes(lengths), _right(values)
    total, pairs = 0.0, 0
    for size in range(_MIDDLE + 1):
        sides = [right[classes == side] for side in dict.fromkeys((size, -size))]
        if all(len(side) for side in sides):
            count = sum(len(side) for side in sides)
            total += count * sum(float(side.mean()) for side in sides) / len(sides)
            pairs += count
    return total / pairs if pairs else None


def _right(values: Floats) -> Floats:
    """1 above 0, one half for a tie."""
    return np.where(values == 0, 0.5, (values > 0).astype(np.float64))


def _classes(lengths: Floats) -> NDArray[np.int64]:
    """The class of each pair by the lengths of its answers (N, 2), from -3 to 3: above 0 the chosen one is longer."""
    difference, shorter = lengths[:, 0] - lengths[:, 1], lengths.min(1)
    size = sum((np.abs(difference) > share * shorter).astype(np.int64) for share in _LONGER)
    return np.asarray(np.sign(difference).astype(np.int64) * size)


def margins_of_pairs(
    sequences: Sequence[TokenizedRow], values: Floats, lengths: Floats, tokenizer: PreTrainedTokenizerBase
) -> Margins:
    """Margins of pairs; chosen and rejected answers take turns in ``sequences``."""

    def wrong(pair: int) -> WrongRow:
        (prompt, chosen), (_, rejected) = (_texts(sequences[row], tokenizer) for row in (2 * pair, 2 * pair + 1))
        origin = str(sequences[2 * pair].row.origin)
        return WrongRow(origin, float(values[pair]), prompt, chosen, rejected)

    sources = [sequences[row].row.source for row in range(0, len(sequences), 2)]
    return Margins("pairs", values, lengths, None, sources, _worst(values, wrong))


def margins_of_answers(
    sequences: Iterable[TokenizedRow], rewards: Floats, lengths: Floats, tokenizer: PreTrainedTokenizerBase
) -> Margins:
    """Margins of labelled answers."""
    rows = list(sequences)
    labels = np.array([np.sign(tokens.value) for tokens in rows])

    def wrong(row: int) -> WrongRow:
        prompt, answer = _texts(rows[row], tokenizer)
        return WrongRow(str(rows[row].row.origin), float(rewards[row]), prompt, answer, label=int(labels[row]))

    sources = [tokens.row.source for tokens in rows]
    return Margins("answers", rewards, lengths[:, None], labels, sources, _worst(rewards * labels, wrong))


def _worst(sides: Floats, wrong: Callable[[int], WrongRow]) -> tuple[WrongRow, ...]:
    """The rows that are furthest below 0."""
    first = np.argsort(sides, kind="stable")[:WORST_ROWS]
    return tuple(wrong(int(row)) for row in first if sides[row] < 0)


def _texts(row: TokenizedRow, tokenizer: PreTrainedTokenizerBase) -> tuple[Excerpt, Excerpt]:
    """Prompt and answer as the model sees them, with special tokens."""
    begin = next((place for place, label in enumerate(row.labels) if label != IGNORE_INDEX), len(row.labels))
    texts = [str(tokenizer.decode(ids)) for ids in (row.input_ids[:begin], row.input_ids[begin:])]
    prompt, answer = (Excerpt(text[:SHOWN_CHARACTERS], max(0, len(text) - SHOWN_CHARACTERS)) for text in texts)
    return prompt, answer
