"""The best evaluation so far: which checkpoint to keep, and when to stop because nothing gets better."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ftcli.run.metrics import MetricsLine


class TrainingOver(Exception):
    """Nothing is left to train, although steps are left: raised when training begins again after such an end."""


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """``train.early_stopping``: after ``patience`` evaluations in a row that are not better by ``min_delta``."""

    patience: int
    min_delta: float


@dataclass(slots=True)
class BestEvaluation:
    """The best evaluation so far.

    Attributes:
        value: Held-out loss; without one the mean score of the tasks, negated. None before the first evaluation.
        step: When that was.
        worse: Evaluations in a row without an improvement.
    """

    value: float | None = None
    step: int = 0
    worse: int = 0

    def note(self, step: int, metrics: MetricsLine, min_delta: float = 0.0) -> bool:
        """Takes an evaluation into account; True when it is the best so far. One that is better by no more than
        ``min_delta`` counts as no improvement.
        """
        value = measured(metrics)
        if value is None:
            return False
        best = self.value
        self.worse = 0 if best is None or value < best - min_delta else self.worse + 1
        if best is not None and value >= best:
            return False
        self.value, self.step = value, step
        return True


def measured(metrics: MetricsLine) -> float | None:
    """Value to minimise: the loss, else the negated mean score; None if nothing was measured, or not finite."""
    loss = metrics.get("eval_loss")
    if loss is None:
        scores = [value for name, value in metrics.items() if name.startswith("eval_") and isinstance(value, float)]
        if not scores:
            return None
        loss = -sum(scores) / len(scores)
    return float(loss) if math.isfinite(loss) else None
