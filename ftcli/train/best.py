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


@dataclass(frozen=True, slots=True)
class Goal:
    """``train.metric_for_best_model``: the metric, without ``eval_``, and whether more of it is better."""

    metric: str
    more_is_better: bool


@dataclass(slots=True)
class BestEvaluation:
    """The best evaluation so far.

    Attributes:
        value: Held-out loss; without one the mean score of the tasks, negated. Of a :class:`Goal` its metric, negated
            where more is better. None before the first evaluation.
        step: When that was.
        worse: Evaluations in a row without an improvement.
        metric: That of the goal.
    """

    value: float | None = None
    step: int = 0
    worse: int = 0
    metric: str | None = None

    def note(self, step: int, metrics: MetricsLine, min_delta: float = 0.0, goal: Goal | None = None) -> bool:
        """Takes an evaluation into account; True when it is the best so far: as good as the best is not. One that is
        better by no more than ``min_delta`` counts as no improvement.
        """
        value = measured(metrics, goal)
        if value is None:
            return False
        metric = None if goal is None else goal.metric
        if metric != self.metric:  # the recipe was changed since: other numbers are no measure of this one
            self.value, self.worse, self.metric = None, 0, metric
        best = self.value
        self.worse = 0 if best is None or value < best - min_delta else self.worse + 1
        if best is not None and value >= best:
            return False
        self.value, self.step = value, step
        return True


def measured(metrics: MetricsLine, goal: Goal | None = None) -> float | None:
    """Value to minimise: the goal's, or the loss, or the negated mean score; None if not measured, or not finite."""
    if goal is not None:
        value = metrics.get(f"eval_{goal.metric}")
        if value is None or not math.isfinite(value):
            return None
        return -float(value) if goal.more_is_better else float(value)
    loss = metrics.get("eval_loss")
    if loss is None:
        scores = [value for name, value in metrics.items() if name.startswith("eval_") and isinstance(value, float)]
        if not scores:
            return None
        loss = -sum(scores) / len(scores)
    return float(loss) if math.isfinite(loss) else None
