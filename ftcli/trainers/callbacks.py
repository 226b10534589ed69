"""The callback that decides when a trainer logs, shows progress, evaluates, saves and stops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ftcli.preflight.memory.terms import STEP
from ftcli.run.metrics import MetricsLine
from ftcli.run.signals import StopRequested
from ftcli.train.best import TrainingOver
from ftcli.train.loop import Attendance

if TYPE_CHECKING:
    from ftcli.trainers.base import RunTrainerMixin


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Turns the trainer's events into metrics lines, progress, evaluations, checkpoints and stops.

    Args:
        trainer: The trainer it belongs to.
        attendance: When to log, evaluate and save; where lines go; who is shown progress and may stop.
    """

    def __init__(self, trainer: RunTrainerMixin, attendance: Attendance) -> None:
        self._trainer = trainer
        self._schedule, self._write = attendance.intervals, attendance.write
        self._progress, self._stop = attendance.progress, attendance.stop
        self.last: MetricsLine = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Goes on where the checkpoint left tokens, window and evaluation.

        Raises StopRequested when asked to stop, and TrainingOver when evaluations had stopped getting better.
        """
        self._trainer.restore_window()
        self._progress.begin(state.global_step, state.max_steps)
        if self._trainer.evaluation_due:
            self._trainer.evaluate()
        stopped_by = self._trainer.stopped_by or self._stop.requested
        if stopped_by is not None:  # nothing has been done since the checkpoint: there is nothing to save
            raise StopRequested(stopped_by, "starting to train")
        if self._trainer.is_over:
            raise TrainingOver

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Marks the point that a rescue goes back to."""
        self._trainer.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Marks that from here to the end of the step some weights are old and some are new."""
        self._trainer.phase = STEP

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Decides what follows this step.

        A stop does not change which steps are logged: with the run that continues it, the lines are those of a run that
        was never stopped. An evaluation that is due is made by the run that continues.
        """
        step, schedule = state.global_step, self._schedule
        self._trainer.end_step()
        last = step >= state.max_steps or self._trainer.is_over
        self._trainer.check_finite(before_step=step)
        control.should_log = step % schedule.log_every == 0 or last or step == 1
        if schedule.evaluate_every is not None:
            self._trainer.evaluation_due = step % schedule.evaluate_every == 0 and not last
            control.should_evaluate = self._trainer.evaluation_due
        if schedule.save_every is not None:
            control.should_save = step % schedule.save_every == 0 and not last
        if self._trainer.is_over:
            control.should_training_stop = True
        elif self._stop.requested is not None and not last:
            self._trainer.stop_after_saving(self._stop.requested)
        self._progress.show(step, self.last)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: MetricsLine | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a line for each logging step (the summary at the end of training has no ``loss``)."""
        if not logs or "loss" not in logs:
            return
        self._trainer.check_finite()
        self._trainer.take_token_count()
        line: MetricsLine = {
            "step": state.global_step,
            "epoch": logs.get("epoch"),
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": self._trainer.tokens_seen,
            "tokens_per_second": self._trainer.window.take_rate(),
            "peak_memory_bytes": self._trainer.peak_memory_bytes(),
        }
        if self._trainer.tokens_computed:
            line = {**line, "tokens_computed": self._trainer.tokens_computed}
        line = {**line, **{key: value for key, value in logs.items() if key not in line}}
        self.last = line
        self._write(line)
        self._progress.show(state.global_step, line)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: MetricsLine | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the evaluation as a line of its own."""
        if metrics:
            self._write({"step": state.global_step, **metrics})
            self._progress.evaluated(state.global_step, metrics)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """A signal that came while a checkpoint was written ends the run here: there is nothing newer to save."""
        if self._stop.requested is not None and state.global_step < state.max_steps:
            self._trainer.stopped_by = self._stop.requested
            control.should_training_stop = True
        return control
