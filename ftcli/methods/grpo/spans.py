"""How long each part of an optimizer step takes, without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

#: The parts of a step whose time is told; what is left is collating, padding, logging.
ROLLOUT, REWARDS, LOG_PROBS, TRAINING, OPTIMIZER = "rollout", "rewards", "log_probs", "training", "optimizer"


@dataclass(slots=True)
class _Step:
    """``marks``: from when on time belongs to which part; None: to none that is told."""

    number: int
    marks: list[tuple[str | None, Any]]
    tokens: dict[str, int]


class Spans:
    """Seconds and tokens of the parts of each step. A GPU is asked by events, which are read when numbers are logged.

    Args:
        parts: Names of all parts; each has its seconds in each step, 0 where it did not happen.
        counted: Those whose tokens are told, too.
    """

    def __init__(self, device: torch.device, parts: Sequence[str], counted: Sequence[str]) -> None:
        self._cuda = device.type == "cuda"
        self._parts, self._counted = tuple(parts), tuple(counted)
        self._steps: list[_Step] = []

    def begin_step(self, number: int) -> None:
        """A step begins; what an earlier try of it has left is forgotten."""
        self._steps = [step for step in self._steps if step.number < number]
        self._steps.append(_Step(number, [self._mark(None)], dict.fromkeys(self._counted, 0)))

    def enter(self, part: str | None) -> None:
        """What follows belongs to ``part``."""
        if self._steps:
            self._steps[-1].marks.append(self._mark(part))

    def count(self, part: str, tokens: int) -> None:
        """Tokens that went through ``part`` in this step."""
        if self._steps:
            self._steps[-1].tokens[part] += tokens

    def counted(self, part: str) -> int:
        """What :meth:`count` has counted in this step."""
        return self._steps[-1].tokens[part] if self._steps else 0

    def forget_after(self, number: int) -> None:
        """Drops the steps after ``number``, which failed."""
        self._steps = [step for step in self._steps if step.number <= number]

    def take(self) -> list[Mapping[str, float]]:
        """``seconds/<part>`` and ``processed_tokens/<part>`` of each finished step since the last call.

        Waits for the device.
        """
        if self._cuda and self._steps:
            torch.cuda.synchronize()
        found = [self._numbers(step) for step in self._steps]
        self._steps = []
        return found

    def _numbers(self, step: _Step) -> Mapping[str, float]:
        numbers = {f"seconds/{part}": 0.0 for part in self._parts}
        for (part, begin), (_, end) in pairwise(step.marks):
            if part is not None:
                numbers[f"seconds/{part}"] += begin.elapsed_time(end) / 1000.0 if self._cuda else end - begin
        return numbers | {f"processed_tokens/{part}": float(count) for part, count in step.tokens.items()}

    def _mark(self, part: str | None) -> tuple[str | None, Any]:
        if not self._cuda:
            return part, time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return part, event
