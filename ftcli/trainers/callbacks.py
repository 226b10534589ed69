"""The callback that logs, shows progress, evaluates, saves and stops; the trainer's loop does the rest."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from ftcli.trainers.base import RunTrainerMixin

Metrics = dict[str, Any]


class Progress(Protocol):
    """Shows where a run is."""

    def begin(self, step: int, total: int) -> None:
        """Training starts at ``step`` of ``total``."""
        ...

    def show(self, step: int, line: Metrics) -> None:
        """``step`` is done; ``line`` holds the newest numbers."""
        ...


class StopSignal(Protocol):
    """What asks a run to stop (ftcli.run.signals)."""

    @property
    def requested(self) -> str | None:
        """``SIGTERM``, ``SIGINT`` or None."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """When things happen, in optimizer steps; None is never."""

    log_every: int
    evaluate_every: int | None
    save_every: int | None


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Turns the trainer's events into metrics lines, progress, evaluations, checkpoints and stops.

    Args:
        trainer: The trainer it belongs to.
        schedule: When to log, evaluate and save.
        write: Receives one metrics line: ``step``, ``loss``, ``grad_norm``, ``learning_rate``, ``tokens``,
            ``tokens_per_second``, ``peak_memory_bytes``, and ``eval_*`` where an evaluation took place.
        progress: Told the step and the newest numbers after each step.
        stop: Looked at after each step.
    """

    def __init__(
        self,
        trainer: RunTrainerMixin,
        schedule: Schedule,
        write: Callable[[Metrics], None],
        progress: Progress,
        stop: StopSignal,
    ) -> None:
        self._trainer = trainer
        self._schedule = schedule
        self._write = write
        self._progress = progress
        self._stop = stop
        self._since = time.perf_counter()
        self.last: Metrics = {}
        self.stopped_by: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock; on resume the token count goes on where the checkpoint left it."""
        self._trainer.tokens_seen = state.num_input_tokens_seen
        self._progress.begin(state.global_step, state.max_steps)
        self._since = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Decides what follows this step."""
        step, schedule = state.global_step, self._schedule
        last = step >= state.max_steps
        self._trainer.check_finite(before_step=step)
        control.should_log = step % schedule.log_every == 0 or last or step == 1
        if schedule.evaluate_every is not None:
            control.should_evaluate = step % schedule.evaluate_every == 0 and not last
        if schedule.save_every is not None:
            control.should_save = step % schedule.save_every == 0 and not last
        if self._stop.requested is not None and not last:
            self.stopped_by = self._stop.requested
            control.should_log = control.should_save = control.should_training_stop = True
            control.should_evaluate = False
        self._progress.show(step, self.last)
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Metrics | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes a line for each logging step (the summary at the end of training has no ``loss``)."""
        if not logs or "loss" not in logs:
            return
        self._trainer.check_finite()
        tokens = self._trainer.take_token_count()
        now = time.perf_counter()
        line: Metrics = {
            "step": state.global_step,
            "epoch": logs.get("epoch"),
            "loss": logs["loss"],
            "grad_norm": logs.get("grad_norm"),
            "learning_rate": logs.get("learning_rate"),
            "tokens": self._trainer.tokens_seen,
            "tokens_per_second": tokens / max(now - self._since, 1e-9),
            "peak_memory_bytes": peak_memory_bytes(),
        }
        line.update({key: value for key, value in logs.items() if key not in line})
        self._since = now
        self.last = line
        self._write(line)
        self._progress.show(state.global_step, line)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Metrics | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the evaluation as a line of its own and keeps its time out of the throughput."""
        if metrics:
            self._write({"step": state.global_step, **metrics})
        self._since = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keeps the time of saving out of the throughput."""
        self._since = time.perf_counter()


def peak_memory_bytes() -> int:
    """Peak bytes allocated on the GPU, or this process' peak resident set on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
