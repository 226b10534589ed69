"""Scores a task: what the model answered, put to the task's judge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftcli.config import TaskConfig
from ftcli.judges import Function, UserJudge, built_in, columns_of
from ftcli.plain import JsonObject
from ftcli.rows.prompts import Prompt

SAMPLES_KEPT = 8


@dataclass(frozen=True, slots=True)
class Answered:
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
    """``score`` is the mean over the rows that were judged; built-in judges give 0 or 1 a row. ``answers`` are all."""

    name: str
    use: str
    score: float
    rows: int
    answers: tuple[JudgedRow, ...]

    @property
    def samples(self) -> tuple[JudgedRow, ...]:
        """The first rows."""
        return self.answers[:SAMPLES_KEPT]

    def as_dict(self) -> JsonObject:
        """What JSON says of it: not every answer."""
        return {"name": self.name, "use": self.use, "score": self.score, "rows": self.rows, "samples": self.samples}


def judge(task: TaskConfig, answered: Answered, function: Function | None = None) -> TaskResult:
    """Scores one task; all rows are kept, for the report to choose from.

    Args:
        function: The user's, for a task with ``file``. It is called once with all completions, as rewards of GRPO are,
            so that one file can serve both.

    Raises:
        FtcliError: FT765 (exit 4) when the function raises or returns something else.
    """
    references = [prompt.reference for prompt in answered.prompts]
    scores: list[float | None]
    if function is None:
        scores = built_in(task, task.kind)(answered.completions, [text or "" for text in references])
    else:
        # Names that the function is called with anyway cannot be columns; every task has answers, known or not.
        lent = columns_of(answered.prompts)
        columns = {"answer": references, **{k: v for k, v in lent.items() if k not in ("prompts", "completions")}}
        users = UserJudge(str(task.file), function, task.args)
        scores = users.scores(answered.completions, answered.texts, columns)
    kept = zip(answered.texts, references, answered.completions, scores, strict=True)
    answers = tuple(JudgedRow(*row) for row in kept)
    judged = [score for score in scores if score is not None]
    score = math.fsum(judged) / max(len(judged), 1)
    return TaskResult(task.label, task.kind, score, len(judged), answers)
