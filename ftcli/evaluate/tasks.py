"""Scores a task: what the model answered, put to the task's judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftcli.config.evaluation import TaskConfig
from ftcli.data.reasoning import Answer
from ftcli.judges import CALLED_WITH, CompletionBatch, Judge, columns_of
from ftcli.plain import JsonObject
from ftcli.rows.prompts import Prompt

SAMPLES_KEPT = 8


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """A task's rows with what the model said: ``texts`` are the prompts as the model saw them."""

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    answers: Sequence[Answer]


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row of a task: the prompt as the model saw it, what was expected and answered, and the judge's number.

    ``reasoning`` is what the model wrote before its answer; None where it wrote none.
    """

    prompt: str
    reference: str | None
    completion: str
    score: float | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """``score`` is the mean over the rows that were judged; built-in judges give 0 or 1 a row. ``answers`` are all.

    ``failed`` counts rows that the judge failed on; ``failure`` is the first of them in words. ``cut`` counts answers
    that ended only with the room for them, ``cut_reasoning`` those of them whose reasoning had not ended.
    """

    name: str
    use: str
    score: float
    rows: int
    answers: tuple[JudgedRow, ...]
    failed: int = 0
    failure: str | None = None
    cut: int = 0
    cut_reasoning: int = 0

    @property
    def cut_words(self) -> str:
        """Text on the number of answers that were cut off."""
        inside = f", {self.cut_reasoning:,} of them while reasoning," if self.cut_reasoning else ""
        return f"{self.cut:,} of {len(self.answers):,} answers were cut off{inside}"

    @property
    def samples(self) -> tuple[JudgedRow, ...]:
        """The first rows."""
        return self.answers[:SAMPLES_KEPT]

    def as_dict(self) -> JsonObject:
        """The JSON form, without every answer."""
        said = {"name": self.name, "use": self.use, "score": self.score, "rows": self.rows, "failed": self.failed}
        return {**said, "cut": self.cut, "cut_reasoning": self.cut_reasoning, "samples": self.samples}


def judge(task: TaskConfig, answered: AnsweredTask, judge: Judge) -> TaskResult:
    """Scores one task; all rows are kept, for the report to choose from.

    Args:
        judge: The task's. It is asked once with all completions, as rewards of GRPO are, so that one function of the
            user's can serve both.

    Raises:
        FtcliError: FT765 (exit 4) as :meth:`ftcli.judges.Judge.scores`.
    """
    references = [prompt.reference for prompt in answered.prompts]
    # Names that the function is called with anyway cannot be columns; every task has answers, known or not.
    lent = columns_of(answered.prompts)
    columns = {"answer": references, **{k: v for k, v in lent.items() if k not in CALLED_WITH}}
    origins = [prompt.row.origin for prompt in answered.prompts]
    known = [text or "" for text in references]
    completions, reasoning = [one.text for one in answered.answers], [one.reasoning for one in answered.answers]
    asked = answered.prompts  # reward models render them by a template of their own
    scores = judge.scores(CompletionBatch(completions, answered.texts, known, columns, origins, reasoning, asked))
    kept = zip(answered.texts, references, completions, scores.values, reasoning, strict=True)
    answers = tuple(JudgedRow(*row) for row in kept)
    cut = [one for one in answered.answers if one.cut]
    judged = [score for score in scores.values if score is not None]
    score = math.fsum(judged) / max(len(judged), 1)
    return TaskResult(
        task.label,
        task.kind,
        score,
        len(judged),
        answers,
        len(scores.failed),
        scores.example,
        len(cut),
        sum(one.reasoning is not None and not one.text for one in cut),
    )
