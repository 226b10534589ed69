"""What every trainer shares: complete-or-absent checkpoints, token counts, and a stop at the first bad number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, PrinterCallback, TrainerState

from ftcli.config.training import TrainConfig
from ftcli.model.saved import save_weights
from ftcli.plain import JsonObject
from ftcli.preflight.memory.terms import EVALUATION, FORWARD, STEP
from ftcli.run.checkpoint import TRAINER_STATE
from ftcli.run.metrics import MetricsLine
from ftcli.run.signals import SignalName, StopRequested
from ftcli.train.best import BestEvaluation, measured
from ftcli.train.loop import Attendance, Doing, TrainerHooks
from ftcli.train.state import LogWindow, RandomStates, WindowState, readable
from ftcli.train.watch import ROWS_KEY, RowOrigins, WatchedNumber, peak_memory_bytes, row_list
from ftcli.trainers.callbacks import RunCallback
from ftcli.trainers.optimisation import OptimisationMixin

if TYPE_CHECKING:
    from ftcli.model.graphs import GraphRunner


class RunTrainerMixin(OptimisationMixin):
    """Mixed into TRL's trainers, before them in the method resolution order.

    Loss and gradient norm are copied to the host without waiting, and looked at one step later, when they have arrived.
    So the check for NaN never holds up the device. A checkpoint is only written after that check.
    """

    hooks: TrainerHooks
    #: What runs the layers as CUDA graphs, where something does.
    graphs: GraphRunner | None = None

    def bind(self, hooks: TrainerHooks, settings: TrainConfig, row_origins: RowOrigins | None = None) -> None:
        """Attaches the pipeline's hooks; called once, right after construction. ``row_origins`` names rows."""
        self.hooks, self.settings = hooks, settings
        self.row_origins: RowOrigins = row_origins or (lambda _row: ())
        self.tokens_seen = 0
        self.tokens_computed = 0
        self.window = LogWindow()
        self.phase: Doing = "step"
        self.batch_shape: tuple[int, ...] | None = None
        self.evaluation_due = False
        self.saved_step = 0
        self.best = BestEvaluation()
        self.stopped_by: SignalName | None = None
        self._token_count: Tensor | None = None
        self._pending: list[WatchedNumber] = []
        self._rows: list[tuple[int, ...]] = []
        self._batch = -1
        self._callback: RunCallback | None = None
        self._resume_from: Path | None = None
        self._random_states: RandomStates | None = None
        self._at_step_begin: tuple[Tensor | None, int, Tensor] | None = None
        self.remove_callback(PrinterCallback)  # type: ignore[attr-defined]

    # -- numbers ---------------------------------------------------------------------------------------------

    def count_tokens(self, mask: Tensor, computed: int = 0) -> None:
        """Adds the number of ones in an attention mask, without waiting for the device.

        Args:
            computed: All positions of the micro-batch, with those that only fill it up; 0 where they are not counted.
        """
        total = mask.sum()
        self._token_count = total if self._token_count is None else self._token_count + total
        self.tokens_computed += computed

    def take_token_count(self) -> None:
        """Adds the counted tokens to :attr:`tokens_seen` and the window; waits for the device."""
        count = 0 if self._token_count is None else int(self._token_count.item())
        self._token_count = None
        self.tokens_seen += count
        self.window.tokens += count

    def watch(self, name: str, value: Tensor, rows: tuple[int, ...] | None = None) -> None:
        """Remembers a number of this step to be checked for NaN and infinity later."""
        step = self.state.global_step + 1
        self._pending.append(WatchedNumber.copy_of(step, name, self._batch_rows() if rows is None else rows, value))

    def cuda_graphs(self) -> str | None:
        """``on``, or what became of the graphs otherwise; None where there are none."""
        return None if self.graphs is None else self.graphs.status.outcome

    def peak_memory_bytes(self) -> int:
        """The most memory needed at once so far: of the GPU, or of this process on a CPU.

        With graphs, what they keep to themselves counts as in use.
        """
        return peak_memory_bytes() if self.graphs is None else self.graphs.status.peak_bytes

    def check_finite(self, *, before_step: int | None = None) -> None:
        """Raises FtcliError FT702 (exit 6) when a watched number of an earlier step is not finite."""
        due = [w for w in self._pending if before_step is None or w.step < before_step]
        self._pending = [w for w in self._pending if before_step is not None and w.step >= before_step]
        for watched in due:
            watched.require_finite(self.row_origins)

    def watch_loss(self, loss: Tensor) -> None:
        """Remembers the loss of a batch, to be checked for NaN and infinity later."""
        self.watch("the loss", loss)

    def _batch_rows(self) -> tuple[int, ...]:
        return self._rows[self._batch] if 0 <= self._batch < len(self._rows) else ()

    def rows_of_batch(self) -> str:
        """The rows of the batch that is being trained on, by file, as :func:`row_list`; none where it is not known."""
        return row_list(origin for row in self._batch_rows() for origin in self.row_origins(row))

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        own = self.clip_in_step()
        norm: Tensor = super()._clip_grad_norm(model) if own is None else own  # type: ignore[misc]
        self.watch("the gradient norm", norm, tuple(row for rows in self._rows for row in rows))
        return norm

    def floating_point_ops(self, inputs: Mapping[str, Tensor]) -> int:
        """0: transformers' estimate walks over every parameter in every step; `ftcli bench` counts properly."""
        return 0

    # -- steps -----------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The batches of one optimizer step. The numbers of their rows are taken out and remembered."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._rows = [tuple(batch.pop(ROWS_KEY, ())) if isinstance(batch, dict) else () for batch in batches]
        self._batch = -1
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; notes what is being done, for the message when memory runs out."""
        self._batch += 1
        self.phase = FORWARD
        ids = inputs.get("input_ids") if isinstance(inputs, dict) else None
        self.batch_shape = None if ids is None else tuple(ids.shape)
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        self.phase = "step"
        return loss

    def begin_step(self) -> None:
        """Before the first batch of an optimizer step: notes the state that a rescue goes back to."""
        self._at_step_begin = (self._token_count, self.tokens_computed, self._tr_loss.clone())

    def end_step(self) -> None:
        """After the optimizer has stepped, before anything is logged, evaluated or saved."""
        self.phase = "step"
        self._at_step_begin = None
        self._random_states = RandomStates.now()

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The pipeline's token-weighted evaluation instead of transformers' mean over batches.

        A signal ends it at once: the run saves and stops. When it continues, it evaluates first.
        """
        if self.hooks.evaluate is None:
            return {}
        self.evaluation_due = True
        self.take_token_count()
        self.window.stop()
        self.phase = EVALUATION
        model = self.model
        training, states = model.training, RandomStates.now()
        model.eval()
        try:
            with self.evaluated_weights(), self.hooks.interruptible("evaluating"):
                found = self.hooks.evaluate(self.state.global_step)
                metrics = {f"eval_{name}": value for name, value in found.items()}
        except StopRequested as stopped:
            self.stop_after_saving(stopped.signal_name)
            return {}
        finally:
            model.train(training)
            states.restore()  # completions may be sampled, and no weight may depend on when they were
        self.phase = "step"
        self.evaluation_due = False
        state = self.state
        stopping = self.hooks.stopping
        self.schedule_by(measured(metrics))
        is_best = self.best.note(state.global_step, metrics, 0.0 if stopping is None else stopping.min_delta)
        if is_best and self.hooks.keep_best and state.global_step < state.max_steps:
            self.control.should_save = True  # type: ignore[has-type]
        if self.is_over:
            self.control.should_training_stop = True  # type: ignore[has-type]
        self.control = self.callback_handler.on_evaluate(self.args, state, self.control, metrics)  # type: ignore[attr-defined,has-type]
        self.window.start()
        return metrics

    @property
    def why_over(self) -> str | None:
        """Why training ends before its last step; None while it goes on."""
        stopping, best = self.hooks.stopping, self.best
        if stopping is None or best.worse < stopping.patience:
            return None
        return f"no better evaluation than that of step {best.step} in {best.worse} evaluations"

    @property
    def is_over(self) -> bool:
        """Whether there is a reason to end."""
        return self.why_over is not None

    def stop_after_saving(self, signal_name: SignalName) -> None:
        """Ends training after this step; a checkpoint is written first."""
        self.stopped_by = signal_name
        self.control.should_evaluate = False
        self.control.should_save = self.control.should_training_stop = True

    # -- checkpoints -----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        """Trains to the end, from a checkpoint where one is named."""
        self._resume_from = Path(resume_from_checkpoint) if resume_from_checkpoint is not None else None
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]

    def run(self, attendance: Attendance, resume_from: Path | None) -> None:
        """Trains to the end, as :meth:`ftcli.train.loop.TrainingLoop.run`."""
        self._callback = RunCallback(self, attendance)
        self.add_callback(self._callback)  # type: ignore[attr-defined]
        self.train(resume_from_checkpoint=str(resume_from) if resume_from is not None else None)

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return int(self.state.global_step)

    @property
    def last_line(self) -> MetricsLine:
        """The newest line of metrics of a step that this process trained."""
        return {} if self._callback is None else self._callback.last

    def restore_window(self) -> None:
        """Continues the half-filled line of metrics that is in the checkpoint; called when training begins."""
        state = self.state
        self.tokens_seen = state.num_input_tokens_seen
        self.saved_step = state.global_step
        if self._resume_from is not None:
            with readable(str(self._resume_from)):
                self.load_training_weights(self._resume_from)
                self.load_more(self._resume_from)
                self._restore(WindowState.read(self._resume_from))
        self.window.start()

    def _restore(self, found: WindowState | None) -> None:
        if found is None:
            return
        self._tr_loss = torch.tensor(found.loss_sum, device=self.args.device)
        self._globalstep_last_logged = found.logged_step
        self.window.tokens, self.window.seconds = found.tokens, found.seconds
        self.tokens_seen = self.state.num_input_tokens_seen if found.tokens_seen is None else found.tokens_seen
        self.tokens_computed = found.tokens_computed or 0
        self.evaluation_due = found.evaluation_due
        self.best = found.best or BestEvaluation()
        self.restore_extra_window(found.extra)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with readable(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with readable(checkpoint):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def extra_window(self) -> JsonObject:
        """What a trainer gathers for its next line of metrics besides the loss, as JSON values."""
        return {}

    def restore_extra_window(self, extra: JsonObject) -> None:
        """Continues with what :meth:`extra_window` returned."""

    def save_more(self, folder: Path) -> None:
        """Writes into a checkpoint what the trainer's next step needs besides weights and optimizer."""

    def load_more(self, folder: Path) -> None:
        """Reads what :meth:`save_more` wrote."""

    def undo_step(self) -> None:
        """Undoes what a failed step has changed in :meth:`extra_window` and :meth:`save_more`."""

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes adapters or weights, optimizer, schedule, random states and progress, then renames into place."""
        if self.hooks.checkpoints is None:
            return
        self.check_finite()
        if self.hooks.before_checkpoint is not None:
            self.hooks.before_checkpoint()
        self.take_token_count()
        self.window.stop()
        self.phase = "saving"
        state = self.state
        with self.hooks.checkpoints.staging(state.global_step) as folder:
            self.save_training_weights(folder)
            with self.evaluated_weights():
                save_weights(self.model, folder)
            self._save_optimizer_and_scheduler(str(folder))  # type: ignore[attr-defined]
            self._save_scaler(str(folder))  # type: ignore[attr-defined]
            self._save_rng_state(str(folder))  # type: ignore[attr-defined]
            self._export_callback_states()
            state.save_to_json(str(folder / TRAINER_STATE))
            self._window_state().write(folder)
            self.save_more(folder)
        spared = (self.best.step,) if self.hooks.keep_best and self.best.value is not None else ()
        self.hooks.checkpoints.rotate(self.hooks.keep_last, spared)
        self.saved_step = state.global_step
        self.phase = "step"
        self.window.start()

    def _window_state(self) -> WindowState:
        return WindowState(
            loss_sum=float(self._tr_loss),
            logged_step=self._globalstep_last_logged,
            tokens=self.window.tokens,
            seconds=self.window.seconds,
            tokens_seen=self.tokens_seen,
            tokens_computed=self.tokens_computed,
            evaluation_due=self.evaluation_due,
            best=self.best,
            extra=self.extra_window(),
        )

    def _export_callback_states(self) -> None:
        state = self.state
        for callback in [*self.callback_handler.callbacks, self.control]:  # type: ignore[attr-defined]
            if isinstance(callback, ExportableState):
                state.stateful_callbacks[type(callback).__name__] = callback.state()

    def rescue(self) -> int | None:
        """Writes a checkpoint of the last finished step after something else has failed; the step, or None.

        Nothing is written when no step is finished, when the last one has a checkpoint already, or when the failure
        was in an optimizer step, which may have changed some of the weights and not others. The checkpoint is the same
        as one written right after the last step: what the failed step has drawn, counted and added is undone.
        """
        state = getattr(self, "state", None)
        if self.hooks.checkpoints is None or state is None or self.phase in (STEP, "saving"):
            return None
        if state.global_step <= self.saved_step or self._random_states is None:
            return None
        if self._at_step_begin is not None:
            self._token_count, self.tokens_computed, loss_sum = self._at_step_begin
            self._tr_loss.copy_(loss_sum)
            self._pending = [w for w in self._pending if w.step <= state.global_step]
            self._random_states.restore()
            self.undo_step()
        self.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._save_checkpoint(self.model, None)
        return int(state.global_step)

    def take_weights(self, folder: Path) -> None:
        """Loads the trained weights that lie in a checkpoint or a result."""
        self._load_from_checkpoint(str(folder))

    def load_finished(self, checkpoint: Path) -> bool:
        """Loads a checkpoint of the very last step, after which transformers would train one step too many.

        Returns False, and changes nothing, when there are steps left to train.
        """
        with readable(str(checkpoint)):
            state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        if state.global_step < state.max_steps:
            return False
        self.take_weights(checkpoint)
        self.state = state
        with readable(str(checkpoint)):
            found = WindowState.read(checkpoint)
        kept = None if found is None else found.tokens_seen
        self.tokens_seen = state.num_input_tokens_seen if kept is None else kept
        self.tokens_computed = 0 if found is None else found.tokens_computed or 0
        return True
