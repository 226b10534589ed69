"""Judges completions: exact match, contains, regex."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftcli.config import TaskConfig

SAMPLES_KEPT = 8


@dataclass(frozen=True, slots=True)
class TaskResult:
    """``score`` is the share of rows judged right, in [0, 1]."""

    name: str
    use: str
    score: float
    rows: int
    samples: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """For eval.json."""
        return {name: getattr(self, name) for name in self.__slots__}


def is_right(task: TaskConfig, completion: str, reference: str | None) -> bool:
    """Whether ``completion`` passes; exact_match and contains compare with surrounding space removed."""
    if task.use == "regex":
        return re.search(task.pattern or "", completion) is not None
    wanted = (reference or "").strip()
    if task.use == "contains":
        return wanted in completion
    return completion.strip() == wanted


def judge(
    task: TaskConfig, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str | None]
) -> TaskResult:
    """Scores one task; the first rows are kept as samples for the report."""
    right = [is_right(task, c, r) for c, r in zip(completions, references, strict=True)]
    samples = tuple(
        {"prompt": p, "reference": r, "completion": c, "right": ok}
        for p, c, r, ok in zip(prompts, completions, references, right, strict=True)
    )
    score = sum(right) / max(len(right), 1)
    return TaskResult(task.name or task.use, task.use, score, len(right), samples[:SAMPLES_KEPT])
