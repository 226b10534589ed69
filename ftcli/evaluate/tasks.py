"""Scores a task: what the model answered, put to the task's judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftcli.config import TaskConfig
from ftcli.judges import CompletionBatch, Judge, columns_of
from ftcli.plain import JsonObject
from ftcli.rows.prompts import Prompt

SAMPLES_KEPT = 8


@dataclass(frozen=True, slots=True)
class AnsweredTask:
    """A task's rows with what the model said: ``texts`` are the prompts as the model saw them."""

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    completions: Sequence[str]


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """One row of a task: the prompt as the model saw it, what was expected and answered, and the judge's number."""

    prompt: str
    reference: str | None
    completion: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class TaskResult:
    """``score`` is the mean over the rows that were judged; built-in judges give 0 or 1 a row. ``answers`` are all.

    ``failed`` counts rows that the judge failed on; ``failure`` is the first of them in words.
    """

    name: str
    use: str
    score: float
    rows: int
    answers: tuple[JudgedRow, ...]
    failed: int = 0
    failure: str | None = None

    @property
    def samples(self) -> tuple[JudgedRow, ...]:
        """The first rows."""
        return self.answers[:SAMPLES_KEPT]

    def as_dict(self) -> JsonObject:
        """What JSON says of it: not every answer."""
        said = {"name": self.name, "use": self.use, "score": self.score, "rows": self.rows, "failed": self.failed}
        return {**said, "samples": self.samples}


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
    columns = {"answer": references, **{k: v for k, v in lent.items() if k not in ("prompts", "completions")}}
    origins = [prompt.row.origin for prompt in answered.prompts]
    known = [text or "" for text in references]
    scores = judge.scores(CompletionBatch(answered.completions, answered.texts, known, columns, origins))
    kept = zip(answered.texts, references, answered.completions, scores.values, strict=True)
    answers = tuple(JudgedRow(*row) for row in kept)
    judged = [score for score in scores.values if score is not None]
    score = math.fsum(judged) / max(len(judged), 1)
    return TaskResult(task.label, task.kind, score, len(judged), answers, len(scores.failed), scores.example)
