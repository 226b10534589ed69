"""Rows of judged answers: the choice of the best and of pairs, their files, and the summary of all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from ftcli.data.asked import RenderedPrompt
from ftcli.data.generated import GeneratedRows, WrittenAnswer
from ftcli.data.reasoning import Answer
from ftcli.plain import FLATTENED, LEFT_OUT, JsonObject
from ftcli.run.samples import ROWS, SampleFolder

if TYPE_CHECKING:
    from ftcli.pipeline.sample_answers import AnswerFiles, Drawing

T = TypeVar("T")

#: What becomes of answers that nothing but their limit ended: left out; possibly the worse of a pair; like any other.
Truncated = Literal["drop", "reject", "keep"]
#: Sums of weighted scores that differ by no more are equal.
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Options of sampling, and of the selection. None takes the recipe's value. ``min_score`` is of an answer to learn
    or the better one of a pair, ``min_margin`` between those; ``per_prompt`` rows of a prompt go into each file;
    ``truncated`` says what becomes of answers that were cut off.
    """

    kept: Literal["sft", "pairs", "all"] = "all"
    num_generations: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    seed: int | None = None
    max_prompts: int | None = None
    min_score: float | None = None
    min_margin: float = 0.0
    per_prompt: int = 1
    truncated: Truncated = "drop"
    checkpoint: str | None = None
    output: Path | None = None
    force: bool = False


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
    """Rules by which answers are chosen: at most ``count`` answers, and pairs, of a prompt; least scores of an answer
    to learn and of the better one of a pair (None: any); and the least ``margin`` of a pair, whose scores differ in any
    case.
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


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A file of rows; prompts that none of them is of, by the reason; answers that the chat template writes
    otherwise.
    """

    path: str
    rows: int
    left_out: Mapping[str, int]
    otherwise: int = 0


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """The worth of the answers: means over answers, and over prompts of the best one; shares of answers that pass
    (``least_score``) and of prompts with one; of prompts whose answers are all as good; and how many were cut off,
    empty or not judged. What is not known is None.
    """

    prompts: int
    answers: int
    mean_score: float | None
    mean_best_score: float | None
    least_score: float | None
    pass_at_1: float | None
    pass_at_n: float | None
    without_spread: float
    truncated: int
    empty: int
    not_judged: int
    tokens: int
    sft: WrittenRows | None = field(default=None, metadata=LEFT_OUT)
    pairs: WrittenRows | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The result of `ftcli sample`. ``tokens_per_second`` is None if every answer was there already."""

    recipe: str
    folder: str
    run: str | None
    checkpoint: str | None
    judges: tuple[str, ...]
    sampling: Drawing
    summary: SampleSummary = field(metadata=FLATTENED)
    tokens_per_second: float | None = None


class Tally:
    """Adds answers up, prompt by prompt."""

    def __init__(self, least: float | None) -> None:
        self._least = least
        self._scores: list[float] = []
        self._best: list[float] = []
        self._counts: Counter[str] = Counter()

    def note(self, answers: Sequence[ScoredAnswer], tokens: int) -> None:
        """The answers to the next prompt."""
        known = [one.score for one in answers if one.score is not None]
        passed = sum(reaches(one, self._least) for one in answers if one.score is not None)
        self._scores.append(math.fsum(known))
        self._best += [max(known)] if known else []
        self._counts.update(
            prompts=1,
            answers=len(answers),
            judged=len(known),
            passed=passed,
            solved=passed > 0,
            alike=alike(known),
            truncated=sum(one.said.cut for one in answers),
            empty=sum(not one.said.text.strip() for one in answers),
            tokens=tokens,
        )

    def summary(self, sft: WrittenRows | None, pairs: WrittenRows | None) -> SampleSummary:
        count, passes = self._counts, self._least is not None
        return SampleSummary(
            prompts=count["prompts"],
            answers=count["answers"],
            mean_score=math.fsum(self._scores) / count["judged"] if count["judged"] else None,
            mean_best_score=math.fsum(self._best) / len(self._best) if self._best else None,
            least_score=self._least,
            pass_at_1=count["passed"] / max(count["judged"], 1) if passes else None,
            pass_at_n=count["solved"] / max(count["prompts"], 1) if passes else None,
            without_spread=count["alike"] / max(count["prompts"], 1),
            truncated=count["truncated"],
            empty=count["empty"],
            not_judged=count["answers"] - count["judged"],
            tokens=count["tokens"],
            sft=sft,
            pairs=pairs,
        )


@dataclass(slots=True)
class _File:
    """A file of rows that is being written."""

    path: str
    put: Callable[[JsonObject], None]
    rows: int = 0
    otherwise: int = 0
    left: LeftOut = field(default_factory=LeftOut)

    def add(self, row: JsonObject, *answers: WrittenAnswer) -> None:
        self.put(row)
        self.rows += 1
        self.otherwise += sum(not one.alike for one in answers)

    @property
    def written(self) -> WrittenRows:
        return WrittenRows(self.path, self.rows, dict(sorted(self.left.items())), self.otherwise)


def write_rows(
    files: AnswerFiles, folder: SampleFolder, made: GeneratedRows, full: float | None, options: SampleOptions
) -> SampleSummary:
    """Writes the files that are asked for, and adds up what the answers are worth. ``full``: the score of an answer
    that passes everything, where there is such a bound.
    """
    least = full if options.min_score is None else options.min_score
    selection = Selection(options.per_prompt, least, options.min_score, options.min_margin, options.truncated)
    tally, kept = Tally(least), tuple(ROWS) if options.kept == "all" else (options.kept,)
    with folder.writing({name: ROWS[name] for name in kept}) as puts:
        opened = {name: _File(str(folder.path / ROWS[name]), put) for name, put in puts.items()}
        for asked, drawn, scores in files.read():
            answers = [ScoredAnswer(one.said, score) for one, score in zip(drawn, scores, strict=True)]
            tally.note(answers, sum(one.tokens for one in drawn))
            # The form of an answer in a row, by its place; made once.
            form = cache(lambda at, asked=asked, drawn=drawn: made.answer(asked, drawn[at].said, drawn[at].whole))
            if (best := opened.get("sft")) is not None:
                for at, answer in choose_best(answers, selection, form, best.left):
                    best.add({**made.completion(asked, answer.content), "score": answers[at].score}, answer)
            if "pairs" in opened:
                _write_pairs(opened["pairs"], made, asked, answers, selection, form)
    written = {name: one.written for name, one in opened.items()}
    return tally.summary(written.get("sft"), written.get("pairs"))


def _write_pairs(
    file: _File,
    made: GeneratedRows,
    asked: RenderedPrompt,
    answers: list[ScoredAnswer],
    wanted: Selection,
    form: Form[WrittenAnswer],
) -> None:
    before, chosen = file.rows, choose_pairs(answers, wanted, form, file.left)
    for (first, better), (second, worse) in chosen:
        row = made.pair(asked, better.content, worse.content)
        if row is not None:
            scores = {"score_chosen": answers[first].score, "score_rejected": answers[second].score}
            file.add({**row, **scores}, better, worse)
    if chosen and file.rows == before:
        file.left["training would refuse it"] += 1
