"""Judges completions: exact match, contains, regex, valid JSON, or a function of the user's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config import TaskConfig
from ftcli.data.formats import Prompt
from ftcli.errors import ExitCode, FtcliError, Origin

SAMPLES_KEPT = 8
#: Columns of a row that hold the conversation itself, and names that a judge is called with anyway.
_NOT_COLUMNS = frozenset({"prompt", "completion", "messages", "conversations", "prompts", "completions"})

Judge = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Answered:
    """A task's rows with what the model said: ``texts`` are the prompts as the model saw them."""

    prompts: Sequence[Prompt]
    texts: Sequence[str]
    completions: Sequence[str]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """``score`` is the mean over the rows that were judged; built-in judges give 0 or 1 a row."""

    name: str
    use: str
    score: float
    rows: int
    samples: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """For eval.json."""
        return {name: getattr(self, name) for name in self.__slots__}


def is_right(task: TaskConfig, completion: str, reference: str | None) -> bool:
    """Whether ``completion`` passes a built-in judge; comparisons leave surrounding space out."""
    if task.kind == "regex":
        return re.search(task.pattern or "", completion) is not None
    if task.kind == "json_valid":
        return _is_json(completion)
    wanted = (reference or "").strip()
    if task.kind == "contains":
        return wanted in completion
    return completion.strip() == wanted


def _is_json(text: str) -> bool:
    """One JSON value and nothing else; NaN and Infinity are not JSON."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return True


def judge(task: TaskConfig, answered: Answered, function: Judge | None = None) -> TaskResult:
    """Scores one task; the first rows are kept as samples for the report.

    Args:
        function: The user's, for a task with ``file``: called once as ``function(completions, prompts, **columns)``,
            as rewards of GRPO are, so that one file can serve both. It returns a number for each row, or None for a row
            that it does not judge.

    Raises:
        FtcliError: FT765 (exit 4) when the function raises or returns something else.
    """
    references = [prompt.reference for prompt in answered.prompts]
    if function is None:
        pairs = zip(answered.completions, references, strict=True)
        scores: list[float | None] = [float(is_right(task, c, r)) for c, r in pairs]
    else:
        scores = _scores(task, answered, function)
    kept = zip(answered.texts, references, answered.completions, scores, strict=True)
    samples = [{"prompt": p, "reference": r, "completion": c, "score": s} for p, r, c, s in kept]
    judged = [score for score in scores if score is not None]
    score = math.fsum(judged) / max(len(judged), 1)
    return TaskResult(task.label, task.kind, score, len(judged), tuple(samples[:SAMPLES_KEPT]))


def columns_of(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Columns that every row has, and ``answer`` from the reference where there is no such column."""
    names = set.intersection(*(set(prompt.row.fields) for prompt in prompts)) if prompts else set()
    columns = {name: [prompt.row.fields[name] for prompt in prompts] for name in sorted(names - _NOT_COLUMNS)}
    return {"answer": [prompt.reference for prompt in prompts], **columns}


def _scores(task: TaskConfig, answered: Answered, function: Judge) -> list[float | None]:
    columns = columns_of(answered.prompts)
    arguments: Mapping[str, Any] = {**columns, **task.args}
    try:
        result = function(completions=list(answered.completions), prompts=list(answered.texts), **arguments)
    except Exception as error:
        raise _bad(task, f"raised {type(error).__name__}: {error}") from error
    expected = len(answered.completions)
    if not isinstance(result, list | tuple) or len(result) != expected:
        found = f"{len(result)} values" if isinstance(result, list | tuple) else type(result).__name__
        raise _bad(task, f"returned {found}, a list of {expected} numbers was expected")
    for index, value in enumerate(result):
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise _bad(task, f"returned {value!r} for completion {index + 1}; expected a finite number or None")
    return [None if value is None else float(value) for value in result]


def _bad(task: TaskConfig, message: str) -> FtcliError:
    spec = str(task.file)
    return FtcliError.single("FT765", f"the function {spec} {message}", exit_code=ExitCode.DATA, origin=Origin(spec))
