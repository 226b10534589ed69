"""The choice among several answers to one prompt: the best, and pairs of a better and a worse one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from ftcli.data.reasoning import Answer

T = TypeVar("T")

#: What becomes of answers that nothing but their limit ended: left out; possibly the worse of a pair; like any other.
Truncated = Literal["drop", "reject", "keep"]
#: Sums of weighted scores that differ by no more are equal.
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """An answer and its score; None where no judge had an opinion."""

    said: Answer
    score: float | None

    @property
    def identity(self) -> tuple[str, str]:
        """Its text and reasoning without the white space around, which templates trim: equal for equal answers."""
        return self.said.text.strip(), (self.said.reasoning or "").strip()


@dataclass(frozen=True, slots=True)
class Selection:
    """Rules by which answers are chosen.

    Attributes:
        count: Most answers, and most pairs, of a prompt.
        best: Least score of an answer to learn; None: any.
        chosen: Least score of the better one of a pair; None: any.
        margin: Least difference of the scores of a pair; where it is 0 they differ all the same.
    """

    count: int = 1
    best: float | None = None
    chosen: float | None = None
    margin: float = 0.0
    truncated: Truncated = "drop"


#: Prompts of which nothing was chosen, by the reason.
LeftOut: TypeAlias = Counter[str]
#: An answer as a row holds it; None where training would refuse it.
Form = Callable[[int], T | None]


def choose_best(
    answers: Sequence[ScoredAnswer], selection: Selection, form: Form[T], left: LeftOut
) -> list[tuple[int, T]]:
    """The best answers of a prompt by their places, each with its form; of equally good ones those drawn first."""
    ranked = _ranked(answers, selection, learnt=True)
    if not ranked:
        left["no usable answer"] += 1
        return []
    good = [at for at in ranked if reaches(answers[at], selection.best)]
    if not good:
        left["below the least score"] += 1
        return []
    found = list(_formed(good, form, selection.count))
    if not found:
        left["training would refuse it"] += 1
    return found


def choose_pairs(
    answers: Sequence[ScoredAnswer], selection: Selection, form: Form[T], left: LeftOut
) -> list[tuple[tuple[int, T], tuple[int, T]]]:
    """Pairs of a prompt: the best with the worst answer, the next best with the next worst; no answer is in two."""
    better, worse = _ranked(answers, selection, learnt=True), _ranked(answers, selection, learnt=False)
    if not better or not worse:
        left["no usable answer"] += 1
        return []
    if alike([answers[at].score or 0.0 for at in (*better, *worse)]):
        left["all answers equally good"] += 1
        return []
    better = [at for at in better if reaches(answers[at], selection.chosen)]
    if not better:
        left["below the least score"] += 1
        return []
    if not _apart(answers[better[0]], answers[worse[-1]], selection.margin):
        left["below the least margin"] += 1
        return []
    chosen, rejected = _formed(better, form, len(better)), _formed(worse[::-1], form, len(worse))
    found: list[tuple[tuple[int, T], tuple[int, T]]] = []
    for first, second in zip(chosen, rejected, strict=False):
        if len(found) == selection.count or not _apart(answers[first[0]], answers[second[0]], selection.margin):
            break
        found.append((first, second))
    if not found:
        left["training would refuse it"] += 1
    return found


def alike(scores: Sequence[float]) -> bool:
    """True if they are all the same, or there is none."""
    return not scores or max(scores) - min(scores) <= _ALIKE


def _ranked(answers: Sequence[ScoredAnswer], selection: Selection, *, learnt: bool) -> list[int]:
    """Places of what may be chosen (``learnt``) or rejected, the best first; of equal answers the first."""
    allowed = ("keep",) if learnt else ("keep", "reject")
    first: dict[tuple[str, str], int] = {}
    for at, one in enumerate(answers):
        whole = not one.said.cut or selection.truncated in allowed
        if one.score is not None and one.identity[0] and whole:
            first.setdefault(one.identity, at)
    return sorted(first.values(), key=lambda at: -(answers[at].score or 0.0))


def reaches(one: ScoredAnswer, least: float | None) -> bool:
    """True if its score, 0 without one, is ``least`` or more."""
    return least is None or (one.score or 0.0) >= least - _ALIKE


def _apart(better: ScoredAnswer, worse: ScoredAnswer, margin: float) -> bool:
    difference = (better.score or 0.0) - (worse.score or 0.0)
    return difference > _ALIKE and difference >= margin - _ALIKE


def _formed(places: Sequence[int], form: Form[T], most: int) -> Iterator[tuple[int, T]]:
    """The first ``most`` that have a form, made when they are asked for."""
    for at in places:
        if most <= 0:
            return
        made = form(at)
        if made is not None:
            most -= 1
            yield at, made
