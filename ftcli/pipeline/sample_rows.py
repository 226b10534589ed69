"""Rows of judged answers: files of the best and of pairs, and the summary of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ftcli.data.asked import RenderedPrompt
from ftcli.data.generated import GeneratedRows, WrittenAnswer
from ftcli.evaluate.draw import Drawing, DrawnAnswer
from ftcli.evaluate.selection import LeftOut, ScoredAnswer, Selection, alike, choose_best, choose_pairs, reaches
from ftcli.pipeline.options import SampleOptions
from ftcli.pipeline.sample_files import AnswerFiles
from ftcli.plain import FLATTENED, LEFT_OUT, JsonObject
from ftcli.run.samples import ROWS, SampleFolder

Form = Callable[[int], WrittenAnswer | None]


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """A file of rows.

    Attributes:
        left_out: Prompts that none of its rows is of, by the reason.
        otherwise: Answers that the chat template writes otherwise than they were generated.
    """

    path: str
    rows: int
    left_out: Mapping[str, int]
    otherwise: int = 0


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """The worth of the answers.

    Attributes:
        mean_score, mean_best_score: Over answers, and over prompts of the best one; None where nothing was judged.
        least_score: What passes.
        pass_at_1, pass_at_n: Share of answers that pass, and of prompts with one that does; None without a least score.
        without_spread: Share of prompts whose answers all have the same score.
        truncated, empty, not_judged: Answers that only their limit ended, without text, and without a score.
        tokens: That were generated.
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
        self._prompts = self._answers = self._passed = self._solved = self._alike = 0
        self._truncated = self._empty = self._not_judged = self._tokens = 0

    def note(self, answers: Sequence[ScoredAnswer], tokens: int) -> None:
        """The answers to the next prompt."""
        known = [one.score for one in answers if one.score is not None]
        passed = sum(reaches(one, self._least) for one in answers if one.score is not None)
        self._scores.append(math.fsum(known))
        self._best += [max(known)] if known else []
        self._prompts += 1
        self._answers += len(answers)
        self._passed += passed
        self._solved += passed > 0
        self._alike += alike(known)
        self._truncated += sum(one.said.cut for one in answers)
        self._empty += sum(not one.said.text.strip() for one in answers)
        self._not_judged += len(answers) - len(known)
        self._tokens += tokens

    def summary(self, sft: WrittenRows | None, pairs: WrittenRows | None) -> SampleSummary:
        """All that was noted."""
        judged = self._answers - self._not_judged
        passes = self._least is not None
        return SampleSummary(
            prompts=self._prompts,
            answers=self._answers,
            mean_score=math.fsum(self._scores) / judged if judged else None,
            mean_best_score=math.fsum(self._best) / len(self._best) if self._best else None,
            least_score=self._least,
            pass_at_1=self._passed / max(judged, 1) if passes else None,
            pass_at_n=self._solved / max(self._prompts, 1) if passes else None,
            without_spread=self._alike / max(self._prompts, 1),
            truncated=self._truncated,
            empty=self._empty,
            not_judged=self._not_judged,
            tokens=self._tokens,
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
        """One more row."""
        self.put(row)
        self.rows += 1
        self.otherwise += sum(not one.alike for one in answers)

    @property
    def written(self) -> WrittenRows:
        """Its account."""
        return WrittenRows(self.path, self.rows, dict(sorted(self.left.items())), self.otherwise)


def write_rows(
    files: AnswerFiles, folder: SampleFolder, made: GeneratedRows, full: float | None, options: SampleOptions
) -> SampleSummary:
    """Writes the files that are asked for, and adds up what the answers are worth.

    Args:
        full: The score of an answer that passes everything, where there is such a bound.
    """
    least = full if options.min_score is None else options.min_score
    selection = Selection(options.per_prompt, least, options.min_score, options.min_margin, options.truncated)
    tally = Tally(least)
    with folder.writing({name: ROWS[name] for name in _kept(options)}) as puts:
        opened = {name: _File(str(folder.path / ROWS[name]), put) for name, put in puts.items()}
        for asked, drawn, scores in files.read():
            answers = [ScoredAnswer(one.said, score) for one, score in zip(drawn, scores, strict=True)]
            tally.note(answers, sum(one.tokens for one in drawn))
            form = _forms(made, asked, drawn)
            if "sft" in opened:
                _write_best(opened["sft"], made, asked, answers, selection, form)
            if "pairs" in opened:
                _write_pairs(opened["pairs"], made, asked, answers, selection, form)
    written = {name: one.written for name, one in opened.items()}
    return tally.summary(written.get("sft"), written.get("pairs"))


def _kept(options: SampleOptions) -> tuple[str, ...]:
    return tuple(ROWS) if options.kept == "all" else (options.kept,)


def _forms(made: GeneratedRows, asked: RenderedPrompt, drawn: list[DrawnAnswer]) -> Form:
    """A function of an answer's place to its form in a row, made once."""
    known: dict[int, WrittenAnswer | None] = {}

    def form(at: int) -> WrittenAnswer | None:
        if at not in known:
            known[at] = made.answer(asked, drawn[at].said, drawn[at].whole)
        return known[at]

    return form


def _write_best(
    file: _File, made: GeneratedRows, asked: RenderedPrompt, answers: list[ScoredAnswer], wanted: Selection, form: Form
) -> None:
    for at, answer in choose_best(answers, wanted, form, file.left):
        file.add({**made.completion(asked, answer.content), "score": answers[at].score}, answer)


def _write_pairs(
    file: _File, made: GeneratedRows, asked: RenderedPrompt, answers: list[ScoredAnswer], wanted: Selection, form: Form
) -> None:
    before, chosen = file.rows, choose_pairs(answers, wanted, form, file.left)
    for (first, better), (second, worse) in chosen:
        row = made.pair(asked, better.content, worse.content)
        if row is not None:
            scores = {"score_chosen": answers[first].score, "score_rejected": answers[second].score}
            file.add({**row, **scores}, better, worse)
    if chosen and file.rows == before:
        file.left["training would refuse it"] += 1
