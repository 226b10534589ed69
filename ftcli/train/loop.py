"""The training loop: batches, loss, backward, all-reduce, clip, optimizer, schedule; then log, evaluate, save, stop.

Loss and gradient norm are copied to the host without waiting and looked at one step later, when they have arrived, so
that the check for NaN never holds up the device. A checkpoint is only written after that check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ftcli.errors import Origin
from ftcli.model.trained_weights import load_weights, save_weights
from ftcli.model.vision import READ_BY_HOST
from ftcli.plain import JsonObject
from ftcli.plan.memory.terms import BACKWARD, EVALUATION, FORWARD, STEP, Phase
from ftcli.run.completions import ScoredCompletion
from ftcli.run.metrics import MetricsLine
from ftcli.run.signals import SignalName, StopRequested
from ftcli.train.checkpoint_state import (
    LogWindow,
    Progress,
    RandomStates,
    WindowState,
    load_state,
    readable,
    save_state,
)
from ftcli.train.evaluation import BestEvaluation, EarlyStopping, Goal, TrainingOver, measured
from ftcli.train.optimizer import Optimization, load_training_weights
from ftcli.train.parallel import Divisors, MicroBatch, Parallel
from ftcli.train.watch import WatchedNumber, peak_memory_bytes, row_list

if TYPE_CHECKING:
    from ftcli.model.cuda_graphs import GraphRunner
    from ftcli.run.checkpoint import Checkpoints
    from ftcli.run.process_group import RankGroup
    from ftcli.run.signals import StopRequest

#: What training is doing: a phase of the memory estimate, or what has none of its own there. ``step`` stands for
#: everything between the others, such as collating and logging.
Doing: TypeAlias = Phase | Literal["step", "saving"]


class StepMonitor(Protocol):
    """The questions that an objective may ask of the loop while it makes a step's micro-batches."""

    def enter(self, doing: Doing) -> None:
        """Notes what is being done, for the message when memory runs out."""
        ...

    def check_finite(self) -> None:
        """Raises FtcliError FT702 (exit 6) when a number of an earlier step is not finite."""
        ...


class Objective(ABC):
    """The training objective of a method: the micro-batches of each step, their loss, and its part of logs and
    checkpoints. A method without the latter overrides nothing but the abstract functions.

    Attributes:
        steps_per_epoch: Optimizer steps in which all data is seen once.
    """

    steps_per_epoch: int

    @abstractmethod
    def micro_batches(self, step: int, monitor: StepMonitor) -> Sequence[MicroBatch]:
        """This rank's micro-batches of the optimizer step after ``step`` finished ones."""

    @abstractmethod
    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The loss of a micro-batch on the device: its part of the step's loss."""

    @abstractmethod
    def epochs_done(self, step: int) -> float:
        """Number of passes over all data after so many steps."""

    def row_origins(self, row: int) -> Sequence[Origin]:
        """Places in data files of the numbered row of a micro-batch; several for a packed row."""
        return ()

    def begin(self, step: int) -> None:
        """The step after ``step`` finished ones begins; :meth:`undo` goes back to here."""

    def launched(self, number: int) -> None:
        """The step's micro-batch of this number, from 0, is on its way on the device; the host has time meanwhile."""

    def reduced(self) -> None:
        """All ranks' gradients of this step are added up; the optimizer follows."""

    def end(self, step: int) -> None:
        """``step`` is done, and nothing is logged, evaluated or saved yet."""

    def undo(self, step: int) -> None:
        """Forgets what was done since :meth:`begin`: the step after ``step`` finished ones has failed."""

    @property
    def why_over(self) -> str | None:
        """The reason why training ends before its last step; None while it goes on."""
        return None

    def metrics(self) -> MetricsLine:
        """Numbers for a line of metrics, of the steps since the last one."""
        return {}

    def logged(self, step: int) -> None:
        """A line of metrics was written after ``step``."""

    def state(self) -> JsonObject:
        """The objective's part of a checkpoint, as JSON values."""
        return {}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with what :meth:`state` returned; it is empty in checkpoints that kept nothing."""

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint what is too large for :meth:`state`."""

    def load(self, folder: Path, device: torch.device) -> None:
        """Reads what :meth:`save` wrote."""


class StepWatcher:
    """Is told of steps as they happen: trained quantization, the benchmark's clock."""

    def start(self) -> None:
        """Training begins; weights are on the device."""

    def begin(self, step: int) -> None:
        """The step after ``step`` finished ones begins."""

    def stepped(self, step: int) -> None:
        """The optimizer has written the weights of ``step``."""

    def end(self) -> None:
        """Training is over."""


class StepDisplay(Protocol):
    """Shows where a run is: :class:`ftcli.train.progress.StepProgress`."""

    def begin(self, step: int, total: int) -> None:
        """Training starts at ``step`` of ``total``."""

    def show(self, step: int, line: MetricsLine) -> None:
        """``step`` is done; ``line`` holds the newest numbers."""

    def evaluated(self, step: int, metrics: MetricsLine) -> None:
        """Held-out results after ``step``, as ``eval_*``."""


def not_interruptible(_phase: str) -> AbstractContextManager[None]:
    """A block that a signal does not end."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """Storage, evaluation, and how many checkpoints to keep.

    With ``keep_best`` the checkpoint of the best evaluation is saved and kept; ``stopping`` ends training early; both
    look at ``goal``, or at what is measured by default.
    ``before_checkpoint`` puts the metrics on disk, so that no checkpoint is ahead of them. ``interruptible`` is entered
    around evaluation, which is told the step: a signal raises StopRequested in it. ``completions`` takes what a model
    that learns from rewards said at a logging step.
    """

    checkpoints: Checkpoints | None
    keep_last: int
    evaluate: Callable[[int], dict[str, float]] | None
    before_checkpoint: Callable[[], None] | None = None
    interruptible: Callable[[str], AbstractContextManager[None]] = not_interruptible
    keep_best: bool = False
    stopping: EarlyStopping | None = None
    goal: Goal | None = None
    completions: Callable[[int, Sequence[ScoredCompletion]], None] | None = None


@dataclass(frozen=True, slots=True)
class StepIntervals:
    """Optimizer steps between logs, evaluations and checkpoints; None is never."""

    log_every: int
    evaluate_every: int | None
    save_every: int | None


@dataclass(frozen=True, slots=True)
class Attendance:
    """The hooks of a loop: when it logs, evaluates and saves, where lines go, who is shown progress and may stop.

    ``write`` takes a line of metrics: ``step``, ``epoch``, ``loss``, ``grad_norm``, ``learning_rate``, ``tokens``,
    ``tokens_per_second``, ``peak_memory_bytes``, ``tokens_computed`` with padding and filler; or ``step`` and
    ``eval_*``.
    """

    intervals: StepIntervals
    write: Callable[[MetricsLine], None]
    progress: StepDisplay
    stop: StopRequest | RankGroup


@dataclass(frozen=True, slots=True)
class _StepBegin:
    """The state when the step began, for a checkpoint after a failure in it."""

    tokens_seen: int
    window_tokens: int
    tokens_computed: int
    loss_sum: Tensor


class TrainingLoop:
    """Trains ``model`` for ``steps`` optimizer steps.

    Args:
        setting_up: Entered for the time of training, such as hooks on the embedding.
        graphs: What runs the layers as CUDA graphs, where something does.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        optimization: Optimization,
        parallel: Parallel,
        hooks: TrainerHooks,
        *,
        steps: int,
        device: torch.device,
        watchers: Sequence[StepWatcher] = (),
        setting_up: Callable[[], AbstractContextManager[object]] = nullcontext,
        graphs: GraphRunner | None = None,
    ) -> None:
        self.model, self.objective, self.optimization, self.parallel = model, objective, optimization, parallel
        self.hooks, self.steps, self.device, self.graphs = hooks, steps, device, graphs
        self.watchers, self._setting_up = list(watchers), setting_up
        self.attendance: Attendance | None = None
        self.step = self.saved_step = 0
        self.tokens_seen = self.tokens_computed = 0
        self.window, self.best = LogWindow(), BestEvaluation()
        self.phase: Doing = "step"
        self.batch_shape: tuple[int, ...] | None = None
        self.evaluation_due = False
        self.stopped_by: SignalName | None = None
        self.last_line: MetricsLine = {}
        self._loss_sum = torch.tensor(0.0, device=device)
        self._logged_step = 0
        self._stopping = False
        self._pending: list[WatchedNumber] = []
        self._last_norm = 0.0
        self._rows: tuple[int, ...] = ()
        self._step_begin: _StepBegin | None = None
        self._random_states: RandomStates | None = None

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self, attendance: Attendance | None, resume_from: Path | None = None) -> None:
        """Trains to the last step, to a stop, or to the end that evaluations call for.

        Args:
            attendance: Who attends to it; None for steps that nobody logs, evaluates or saves.
            resume_from: The checkpoint to resume from.

        Raises StopRequested when asked to stop before a step was made, TrainingOver when evaluations had stopped
        getting better, FtcliError FT702 (exit 6) on divergence.
        """
        self.attendance = attendance
        with self._setting_up():
            self._begin(resume_from)
            while self.step < self.steps and not self._stopping:
                norm, rate = self._train_step()
                self._after_step(norm, rate)
            for watcher in self.watchers:
                watcher.end()

    def _begin(self, resume_from: Path | None) -> None:
        """Resumes where the checkpoint left weights, optimizer, counts, window, and an evaluation that was due."""
        if resume_from is not None:
            with readable(str(resume_from)):
                self._resume(resume_from)
        self.saved_step = self._logged_step = self.step
        if resume_from is not None:
            with readable(str(resume_from)):
                self.objective.load(resume_from, self.device)
                found = WindowState.read(resume_from)
                self._restore_window(found)
                self.objective.restore({} if found is None else found.extra, Progress.read(resume_from))
        self.window.start()
        self.model.train()
        for watcher in self.watchers:
            watcher.start()
        if self.attendance is not None:
            self.attendance.progress.begin(self.step, self.steps)
        if self.evaluation_due:
            self._evaluate()
        stopped_by = self.stopped_by or (None if self.attendance is None else self.attendance.stop.requested)
        if stopped_by is not None:  # nothing has been done since the checkpoint: there is nothing to save
            raise StopRequested(stopped_by, "starting to train")
        if self.is_over:
            raise TrainingOver
        if resume_from is not None:
            with readable(str(resume_from)):
                RandomStates.load(resume_from).restore()

    def _train_step(self) -> tuple[Tensor, float]:
        """One optimizer step: the gradient norm before clipping, and the learning rate."""
        self._step_begin = _StepBegin(
            self.tokens_seen, self.window.tokens, self.tokens_computed, self._loss_sum.clone()
        )
        self.parallel.seed(self.step)
        for watcher in self.watchers:
            watcher.begin(self.step)
        self.objective.begin(self.step)
        self.optimization.begin()
        if not self.model.training:  # of an 8B with adapters it sets a flag of thousands of modules
            self.model.train()
        batches = self.objective.micro_batches(self.step, self)
        total = self.parallel.begin_step(batches, self._last_norm)
        counts = total.counts
        divisors = Divisors(*self._on_device(torch.tensor([float(counts.supervised), float(counts.pairs)])))
        losses: list[Tensor] = []
        for batch in batches:
            with self.parallel.exchanging():
                self.parallel.before_micro_batch(last=len(losses) == len(batches) - 1)
                losses.append(self._forward_backward(batch, divisors))
            self.objective.launched(len(losses) - 1)
        self._add_losses(self.parallel.reduce(losses), total.rows)
        self.tokens_seen += counts.real
        self.window.tokens += counts.real
        self.tokens_computed += counts.computed
        self.objective.reduced()
        norm = self.optimization.clip()
        if self.optimization.scaler is None:  # under a loss scale an overflow is no fault: the step is skipped
            self._watch("the gradient norm", norm, tuple(row for rows in total.rows for row in rows))
        self.phase = STEP  # from here to the end of the step some weights are old and some are new
        rate = self.optimization.step(self.step + 1)
        self.step += 1
        for watcher in self.watchers:
            watcher.stepped(self.step)
        return norm, rate

    def _forward_backward(self, batch: MicroBatch, divisors: Divisors) -> Tensor:
        self.phase, self._rows = FORWARD, batch.rows
        ids = batch.inputs.get("input_ids")
        self.batch_shape = None if ids is None else tuple(ids.shape)
        given = batch.inputs.items()
        inputs = {name: value if name in READ_BY_HOST else self._on_device(value) for name, value in given}
        loss = self.objective.loss(inputs, divisors)
        del inputs
        if not self.parallel.active:
            self._watch("the loss", loss, batch.rows)
        self.phase = BACKWARD
        self.optimization.backward(loss)
        self.phase = "step"
        return loss.detach()

    def _on_device(self, value: Tensor) -> Tensor:
        """Copied without waiting: a copy that is waited for would wait for all that the device still has to do."""
        if value.device == self.device:
            return value
        return (value.pin_memory() if self.device.type == "cuda" else value).to(self.device, non_blocking=True)

    def _add_losses(self, losses: Tensor, rows: Sequence[tuple[int, ...]]) -> None:
        """Adds the step's losses up, those of other ranks too, and has each looked at later."""
        for index, loss in enumerate(losses):
            self._loss_sum += loss
            if self.parallel.group is not None and self.parallel.reduces:
                self._watch(f"the loss of rank {index % self.parallel.group.size}", loss, rows[index])

    def _after_step(self, norm: Tensor, rate: float) -> None:
        """Ends a step: log, evaluate, save, stop.

        A stop does not change which steps are logged: with the run that resumes it, the lines are those of a run that
        was never stopped. An evaluation that is due is made by the run that resumes.
        """
        self.phase, self._step_begin = "step", None
        self.objective.end(self.step)
        self._random_states = RandomStates.now()
        self.check_finite(before_step=self.step)
        attendance = self.attendance
        if attendance is None:
            return
        step, when = self.step, attendance.intervals
        last = step >= self.steps or self.is_over
        log = step % when.log_every == 0 or last or step == 1
        self.evaluation_due = bool(when.evaluate_every) and step % (when.evaluate_every or 1) == 0 and not last
        save = bool(when.save_every) and step % (when.save_every or 1) == 0 and not last
        self._stopping = self.is_over
        evaluate = self.evaluation_due
        if not self.is_over and attendance.stop.requested is not None and not last:
            self.stopped_by, self._stopping, evaluate, save = attendance.stop.requested, True, False, True
        attendance.progress.show(step, self.last_line)
        if log and step > self._logged_step:
            self._log(attendance, norm, rate)
        if evaluate:
            save = self._evaluate() or save
        if save:
            self._save()
            if attendance.stop.requested is not None and step < self.steps:
                # it came while the checkpoint was written: there is nothing newer to save
                self.stopped_by, self._stopping = attendance.stop.requested, True

    # -- log -------------------------------------------------------------------------------------------------

    def _log(self, attendance: Attendance, norm: Tensor, rate: float) -> None:
        mean = self._loss_sum.item() / (self.step - self._logged_step)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._logged_step = self.step
        grad_norm = norm.item()
        self.check_finite()
        line: MetricsLine = {
            "step": self.step,
            "epoch": self.objective.epochs_done(self.step),
            "loss": mean,
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": self.tokens_seen,
            "tokens_per_second": self.window.take_rate(),
            "peak_memory_bytes": self.peak_memory_bytes(),
        }
        if self.tokens_computed:
            line = {**line, "tokens_computed": self.tokens_computed}
        line = {**line, **{name: value for name, value in self.objective.metrics().items() if name not in line}}
        self.last_line = line
        attendance.write(line)
        attendance.progress.show(self.step, line)
        self.objective.logged(self.step)

    def enter(self, doing: Doing) -> None:
        """Notes what is being done, for the message when memory runs out."""
        self.phase = doing

    def _watch(self, name: str, value: Tensor, rows: tuple[int, ...]) -> None:
        """Remembers a number of this step to be checked for NaN and infinity later."""
        self._pending.append(WatchedNumber.copy_of(self.step + 1, name, rows, value))

    def check_finite(self, *, before_step: int | None = None) -> None:
        """Raises FtcliError FT702 (exit 6) when a watched number of an earlier step is not finite.

        Ranks look at the same numbers: all raise, or none.
        """
        due = [w for w in self._pending if before_step is None or w.step < before_step]
        self._pending = [w for w in self._pending if before_step is not None and w.step >= before_step]
        for watched in due:
            if watched.name == "the gradient norm":
                self._last_norm = watched.number()
            watched.require_finite(self.objective.row_origins)

    def rows_of_batch(self) -> str:
        """The rows of the batch that is being trained on, by file, as :func:`row_list`."""
        return row_list(origin for row in self._rows for origin in self.objective.row_origins(row))

    def cuda_graphs(self) -> str | None:
        """``on``, or what became of the graphs otherwise; None where there are none."""
        return None if self.graphs is None else self.graphs.status.outcome

    def peak_memory_bytes(self) -> int:
        """The most memory needed at once so far: of the GPU, or of this process on a CPU.

        With graphs, what they keep to themselves counts as in use.
        """
        return peak_memory_bytes() if self.graphs is None else self.graphs.status.peak_bytes

    # -- evaluate --------------------------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Evaluates the model; whether it is the best so far and to be saved.

        A signal ends it at once: the run saves and stops. When it resumes, it evaluates first.
        """
        if self.hooks.evaluate is None:
            return False
        self.evaluation_due = True
        self.window.stop()
        self.phase = EVALUATION
        training, states = self.model.training, RandomStates.now()
        self.model.eval()
        try:
            with self.optimization.evaluated_weights(), self.hooks.interruptible("evaluating"):
                found = self.hooks.evaluate(self.step)
        except StopRequested as stopped:
            self.stopped_by, self._stopping = stopped.signal_name, True
            return True
        finally:
            self.model.train(training)
            states.restore()  # completions may be sampled, and no weight may depend on when they were
        self.phase = "step"
        self.evaluation_due = False
        metrics: MetricsLine = {f"eval_{name}": value for name, value in found.items()}
        self.optimization.schedule_by(measured(metrics))
        stopping = self.hooks.stopping
        min_delta = 0.0 if stopping is None else stopping.min_delta
        best = self.best.note(self.step, metrics, min_delta, self.hooks.goal)
        self._stopping = self._stopping or self.is_over
        if metrics and self.attendance is not None:
            self.attendance.write({"step": self.step, **metrics})
            self.attendance.progress.evaluated(self.step, metrics)
        self.window.start()
        return best and self.hooks.keep_best and self.step < self.steps

    @property
    def why_over(self) -> str | None:
        """The reason why training ends before its last step; None while it goes on."""
        stopping, best = self.hooks.stopping, self.best
        if stopping is None or best.worse < stopping.patience:
            return self.objective.why_over
        what = "evaluation" if best.metric is None else best.metric
        return f"no better {what} than that of step {best.step} in {best.worse} evaluations"

    @property
    def is_over(self) -> bool:
        """True if there is a reason to end."""
        return self.why_over is not None

    # -- save ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Writes adapters or weights, optimizer, schedule, random states and progress; rank 0 writes for all."""
        self.parallel.reshard()
        self.check_finite()
        if self.parallel.leads and self.hooks.checkpoints is not None:
            self._write_checkpoint(self.hooks.checkpoints)
        elif self.parallel.sharded:
            self.parallel.whole_weights()
            self.parallel.optimizer_state(self.optimization.optimizer)
        self.saved_step = self.step

    def _write_checkpoint(self, store: Checkpoints) -> None:
        if self.hooks.before_checkpoint is not None:
            self.hooks.before_checkpoint()
        self.window.stop()
        self.phase = "saving"
        with store.staging(self.step) as folder:
            self.optimization.save_training_weights(folder)
            with self.optimization.evaluated_weights():
                save_weights(self.model, folder, self.parallel.whole_weights())
            save_state(folder, self.optimization, self.parallel.optimizer_state(self.optimization.optimizer))
            RandomStates.now().save(folder)
            Progress(self.step, self.steps, self.objective.epochs_done(self.step), self.tokens_seen).write(folder)
            self._window_state().write(folder)
            self.objective.save(folder)
        spared = (self.best.step,) if self.hooks.keep_best and self.best.value is not None else ()
        store.rotate(self.hooks.keep_last, spared)
        self.phase = "step"
        self.window.start()

    def _window_state(self) -> WindowState:
        return WindowState(
            loss_sum=float(self._loss_sum),
            logged_step=self._logged_step,
            tokens=self.window.tokens,
            seconds=self.window.seconds,
            tokens_seen=self.tokens_seen,
            tokens_computed=self.tokens_computed,
            evaluation_due=self.evaluation_due,
            best=self.best,
            extra=self.objective.state(),
        )

    def save_after_failure(self) -> int | None:
        """Writes a checkpoint of the last finished step after something else has failed; the step, or None.

        Nothing is written when no step is finished, when the last one has a checkpoint already, or when the failure
        was in an optimizer step, which may have changed some of the weights and not others. The checkpoint is the same
        as one written right after the last step: what the failed step has drawn, counted and added is undone.
        """
        if self.hooks.checkpoints is None or self.phase in (STEP, "saving") or not self.parallel.can_save_alone():
            return None
        if self.step <= self.saved_step or self._random_states is None:
            return None
        if self._step_begin is not None:
            begin = self._step_begin
            self.tokens_seen, self.window.tokens = begin.tokens_seen, begin.window_tokens
            self.tokens_computed = begin.tokens_computed
            self._loss_sum = begin.loss_sum
            self._pending = [watched for watched in self._pending if watched.step <= self.step]
            self._random_states.restore()
            self.objective.undo(self.step)
        self.optimization.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._save()
        return self.step

    # -- resume ----------------------------------------------------------------------------------------------

    def _resume(self, checkpoint: Path) -> None:
        """Loads weights, optimizer, schedule and loss scale."""
        self.take_weights(checkpoint)
        load_state(checkpoint, self.optimization, mapped=self.parallel.sharded)
        load_training_weights(self.optimization.trained, checkpoint)
        progress = Progress.read(checkpoint)
        self.step, self.tokens_seen = progress.step, progress.tokens_seen

    def _restore_window(self, found: WindowState | None) -> None:
        if found is None:
            return
        self._loss_sum = torch.tensor(found.loss_sum, device=self.device)
        self._logged_step = found.logged_step
        self.window.tokens, self.window.seconds = found.tokens, found.seconds
        self.tokens_seen = self.tokens_seen if found.tokens_seen is None else found.tokens_seen
        self.tokens_computed = found.tokens_computed or 0
        self.evaluation_due = found.evaluation_due
        self.best = found.best or BestEvaluation()

    def take_weights(self, folder: Path) -> None:
        """Loads the trained weights that lie in a checkpoint or a result; of sharded ones this rank's shards.

        Raises FtcliError FT725 (exit 2) where they are not this model's.
        """
        with readable(str(folder)):
            load_weights(self.model, folder, sharded=self.parallel.sharded)

    def load_finished(self, checkpoint: Path) -> bool:
        """Loads a checkpoint of the very last step. Returns False, and changes nothing, when steps are left."""
        with readable(str(checkpoint)):
            progress, found = Progress.read(checkpoint), WindowState.read(checkpoint)
        if progress.step < progress.steps:
            return False
        self.take_weights(checkpoint)
        self.step = progress.step
        self.tokens_seen = progress.tokens_seen
        self._restore_window(found)
        return True

    # -- the end ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Training is over: the model keeps the weights that are to be evaluated."""
        self.optimization.settle()
        self.parallel.reshard()
