"""Held-out results and answers of a run, before, during and after training: what eval.json says, and which is best."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonMap, is_number, map_in, plain_fields
from ftcli.run.atomic import read_json_object, store_json
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine
from ftcli.run.results import (
    AnsweredRow,
    EvalScores,
    Evaluation,
    MarginsBeforeAndAfter,
    ShownImage,
    TaskScore,
    write_margins,
)
from ftcli.run.resume import OpenedRun

if TYPE_CHECKING:
    from ftcli.evaluate.loss import LossResult
    from ftcli.evaluate.suite import Evaluator, JudgedRow, ModelScores, TaskResult

_OF_LOSS = ("loss", "perplexity", "token_accuracy", "tokens")
#: Rows of a task that are kept: the first ones, and then those that are wrong.
_FIRST_ROWS, _KEPT_ROWS = 8, 24


@dataclass(slots=True)
class HeldOut:
    """Measures a run on rows on its held-out ones, and keeps eval.json and margins.json up to date.

    Attributes:
        base: Results before training; None where they were not measured.
        before: What the model answered then.
        tasks: Scores of the tasks then, where they are scored while training.
        margins: The margins of pairs then, as in margins.json.
    """

    directory: RunDirectory
    evaluator: Evaluator
    model: Any
    base: EvalScores | None = None
    before: Sequence[JudgedRow] = ()
    tasks: Mapping[str, TaskResult] = field(default_factory=dict)
    margins: JsonMap = field(default_factory=dict)

    def begin(self) -> dict[str, float]:
        """Measures the model before training; its numbers by name."""
        loss = self.evaluator.loss(self.model)
        self.base, self.before, self.margins = _of_loss(loss), self._answers(), margins_record(loss)
        self.tasks, scores = self._scored(0)
        self._write(None, _pairs(self.before, ()), {}, None)
        return {**held_out_numbers(loss), **scores}

    def resume(self, run: RunDirectory) -> None:
        """Reads what :meth:`begin` has written into ``run``; what is missing or damaged is left out."""
        raw = read_json_object(run.eval_path)
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            measures = {name: value for name, value in map_in(raw["base"], "measures").items() if is_number(value)}
            self.base = EvalScores(**{name: raw["base"][name] for name in _OF_LOSS}, measures=measures)
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            self.before = _said([row for row in raw["samples"] if row.get("task") is None])
        self.tasks = tasks_before(run)
        self.margins = map_in(read_json_object(run.margins_path), "before")

    def after_step(self, step: int) -> dict[str, float]:
        """Measures the model as it is after ``step``; its numbers by name."""
        loss = self.evaluator.loss(self.model)
        rows = _pairs(self.before, self._answers())
        tasks, scores = self._scored(step)
        self._write(loss, rows, tasks, step)
        return {**held_out_numbers(loss), **scores}

    def end(self) -> dict[str, float]:
        """Measures the trained model; its numbers by name. What the base would have answered is asked now where it was
        not before.
        """
        loss = self.evaluator.loss(self.model)
        after = self._answers()
        if self._for_all(not self.before and bool(after) and hasattr(self.model, "disable_adapter")):
            from ftcli.model.initial_adapters import as_base

            with as_base(self.model):
                self.before = self._answers()
        tasks, scores = self._scored(0)
        self._write(loss, _pairs(self.before, after), tasks, None)
        return {**held_out_numbers(loss), **scores}

    def _scored(self, step: int) -> tuple[Mapping[str, TaskResult], dict[str, float]]:
        """The recipe's tasks where they are scored after ``step``: results on rank 0, and their scores on all."""
        from ftcli.generation.generator import led_by_first
        from ftcli.run.process_group import of_leader

        settings, group = self.evaluator.job.recipe.eval, self.evaluator.group
        if settings.tasks_every_steps is None or step % settings.tasks_every_steps:
            return {}, {}
        found = led_by_first(group, self.model, lambda: self.evaluator.tasks(self.model)) or {}
        scores = {name: task.score for name, task in found.items()}
        return found, dict(of_leader(group, "tasks", scores))

    def _for_all(self, said: bool) -> bool:
        """Broadcasts rank 0's value to all ranks."""
        group = self.evaluator.group
        return said if group is None else bool(group.agree("asking", [said])[0][0])

    def _write(
        self,
        after: LossResult | None,
        rows: Sequence[AnsweredRow],
        tasks: Mapping[str, TaskResult],
        step: int | None,
    ) -> None:
        """Writes what the model before training and, where there is one, that after it came to."""
        if self.evaluator.group is None or self.evaluator.group.leads:
            margins = MarginsBeforeAndAfter(self.margins, margins_record(after), step)
            write_margins(self.directory.margins_path, margins)
            base, now = _with_tasks(self.base, self.tasks), _with_tasks(_of_loss(after), tasks)
            answered = (*rows, *task_samples(self.tasks, tasks))
            store_json(self.directory.eval_path, Evaluation(base, now, answered, step))

    def _answers(self) -> list[JudgedRow]:
        """The model's answers, on rank 0. All ranks call this: each takes part if the model's weights are sharded over
        them.
        """
        from ftcli.generation.generator import led_by_first

        settings, group = self.evaluator.job.recipe, self.evaluator.group
        if not settings.data.eval or not settings.eval.samples:
            return []
        return led_by_first(group, self.model, self._samples) or []

    def _samples(self) -> list[JudgedRow]:
        try:
            return self.evaluator.samples(self.model, self.evaluator.job.recipe.eval.samples)
        except FtcliError as error:
            if error.exit_code != ExitCode.DATA:  # plain text has no prompt to show an answer for
                reason = error.findings[0].message
                self.evaluator.job.reporter.warn(f"eval.samples: no answers are shown this time: {reason}")
            return []


def began_in(opened: OpenedRun) -> RunDirectory:
    """The run that knows what was measured before training: this one, or that whose checkpoint it goes on from."""
    own, checkpoint = opened.directory, opened.resume_from
    return own if checkpoint is None or own.eval_path.is_file() else RunDirectory(checkpoint.resolve().parent.parent)


def held_out_numbers(loss: LossResult | None) -> dict[str, float]:
    """Held-out results as numbers by name; none without held-out data."""
    return {} if loss is None else loss.numbers


def margins_record(loss: LossResult | None) -> JsonMap:
    """Held-out rows one by one, as margins.json has them; empty where nothing is told apart."""
    return {} if loss is None or loss.margins is None else loss.margins.record()


def eval_scores(measured: ModelScores) -> EvalScores | None:
    """One model's results in eval.json's layout; None when nothing was measured."""
    loss, tasks = measured.loss, measured.tasks
    if loss is None and not tasks:
        return None
    return EvalScores(
        **({} if loss is None else _numbers(loss)),
        tasks=_task_scores(tasks),
        datasets={name: plain_fields(replace(part, margins=None)) for name, part in measured.datasets.items()},
        lm_eval=measured.lm_eval,
    )


def _with_tasks(scores: EvalScores | None, tasks: Mapping[str, TaskResult]) -> EvalScores | None:
    return replace(scores or EvalScores(), tasks=_task_scores(tasks)) if tasks else scores


def _of_loss(loss: LossResult | None) -> EvalScores | None:
    return None if loss is None else EvalScores(**_numbers(loss))


def _numbers(loss: LossResult) -> dict[str, Any]:
    return {**{name: getattr(loss, name) for name in _OF_LOSS}, "measures": loss.more}


def _task_scores(tasks: Mapping[str, TaskResult]) -> tuple[TaskScore, ...]:
    return tuple(TaskScore(task.name, task.score, task.rows, task.cut) for task in tasks.values())


def task_samples(base: Mapping[str, TaskResult], run: Mapping[str, TaskResult]) -> tuple[AnsweredRow, ...]:
    """Rows of tasks, as the base model and, once there is one, the trained model answered them: the first ones, and
    then those that the newer of the two has wrong."""
    rows: list[AnsweredRow] = []
    for name in dict.fromkeys((*base, *run)):
        before, after = (tasks[name].answers if name in tasks else () for tasks in (base, run))
        newest = after or before
        wrong = [row for row in newest[_FIRST_ROWS:] if row.score is not None and row.score < 1]
        kept = [*newest[:_FIRST_ROWS], *wrong[: _KEPT_ROWS - _FIRST_ROWS]]
        rows += _pairs(before, kept, name) if after else _pairs(kept, (), name)
    return tuple(rows)


def _pairs(before: Sequence[JudgedRow], after: Sequence[JudgedRow], task: str | None = None) -> tuple[AnsweredRow, ...]:
    """The rows of ``after``, or of ``before`` where that is empty, with both answers."""
    earlier, later = ({row.key: row for row in some} for some in (before, after))
    rows = []
    for row in after or before:
        b, a = earlier.get(row.key), later.get(row.key)
        rows.append(
            AnsweredRow(
                row.prompt,
                row.reference,
                None if b is None else b.completion,
                None if a is None else a.completion,
                task,
                None if b is None else b.score,
                None if a is None else a.score,
                None if b is None else b.reasoning,
                None if a is None else a.reasoning,
                _shown(row),
            )
        )
    return tuple(rows)


def _shown(row: JudgedRow) -> tuple[ShownImage, ...] | None:
    """The row's images, made small for the report."""
    if row.pictures is None:
        return None
    from ftcli.data.pixels import small

    return tuple(ShownImage(picture.id, small(picture)) for picture in row.pictures)


def write_tasks(
    directory: RunDirectory,
    before: Mapping[str, TaskResult],
    after: Mapping[str, TaskResult],
    step: int | None = None,
) -> None:
    """eval.json of a run that is scored by tasks before and after training, or after ``step``; nothing when it has no
    tasks."""
    if before or after:
        base, run = (EvalScores(tasks=_task_scores(tasks)) if tasks else None for tasks in (before, after))
        store_json(directory.eval_path, Evaluation(base, run, task_samples(before, after), step))


def tasks_before(directory: RunDirectory) -> dict[str, TaskResult]:
    """The task results that :func:`write_tasks` wrote before training began; missing or damaged ones are left out."""
    from ftcli.evaluate.suite import TaskResult

    raw = read_json_object(directory.eval_path)
    found: dict[str, TaskResult] = {}
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        for task in raw["base"]["tasks"]:
            rows = _said([row for row in raw["samples"] if row["task"] == task["name"]])
            score, count, cut = float(task["value"]), int(task["count"]), int(task.get("cut", 0))
            found[task["name"]] = TaskResult(task["name"], "", score, count, tuple(rows), cut=cut)
    return found


def _said(rows: Sequence[JsonMap]) -> list[JudgedRow]:
    """The base model's answers, from the rows of eval.json."""
    from ftcli.evaluate.suite import JudgedRow

    return [
        JudgedRow(
            row["prompt"],
            row["reference"],
            row["before"],
            row.get("before_score"),
            row.get("before_reasoning"),
            tuple(image["id"] for image in row.get("images") or ()) or None,
        )
        for row in rows
        if row["before"] is not None
    ]


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
