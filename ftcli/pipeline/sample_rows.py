"""Turns judged answers into files of rows: the best ones to learn, and pairs of a better and a worse one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ftcli.data.asked import RenderedPrompt
from ftcli.data.generated import GeneratedRows, WrittenAnswer
from ftcli.evaluate.draw import DrawnAnswer
from ftcli.evaluate.selection import LeftOut, ScoredAnswer, Selection, choose_best, choose_pairs
from ftcli.pipeline.options import SampleOptions
from ftcli.pipeline.sample_files import AnswerFiles
from ftcli.pipeline.sample_result import SampleSummary, Tally, WrittenRows
from ftcli.plain import JsonObject
from ftcli.run.samples import ROWS, SampleFolder

Form = Callable[[int], WrittenAnswer | None]


@dataclass(slots=True)
class _File:
    """What goes into a file of rows."""

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
        """What has gone into it."""
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
    """How a row holds each answer, found out once."""
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
