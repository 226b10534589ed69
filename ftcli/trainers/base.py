"""What every trainer shares: complete-or-absent checkpoints, token counts, and a stop at the first bad number."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, PrinterCallback
from transformers.trainer_utils import SaveStrategy

from ftcli.errors import ExitCode, FtcliError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINER_STATE = "trainer_state.json"


class CheckpointStore(Protocol):
    """Where checkpoints go (ftcli.run.checkpoint)."""

    def staging(self, step: int) -> AbstractContextManager[Path]:
        """A folder to write into; it becomes the checkpoint of ``step`` when the block ends well."""
        ...

    def rotate(self, keep_last: int) -> None:
        """Removes all but the newest complete checkpoints."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """What the pipeline gives a trainer: storage, evaluation, and how many checkpoints to keep.

    ``before_checkpoint`` puts the metrics on disk, so that no checkpoint is ahead of them.
    """

    checkpoints: CheckpointStore | None
    keep_last: int
    evaluate: Callable[[], dict[str, float]] | None
    before_checkpoint: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """A number of one step on its way to the host; ``arrived`` is None where it never left it."""

    step: int
    name: str
    value: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def copy_of(cls, step: int, name: str, value: Tensor) -> Watched:
        """Starts the copy. Reading a tensor would wait for all work queued before the read; this waits for none."""
        value = value.detach()
        if not value.is_cuda:
            return cls(step, name, value, None)
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        host.copy_(value, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return cls(step, name, host, arrived)

    def number(self) -> float:
        """The number; waits for its own copy only."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.value)


class RunTrainerMixin:
    """Mixed into TRL's trainers, before them in the method resolution order.

    Loss and gradient norm are copied to the host behind the device's back and looked at one step later, when they have
    long arrived, so that the check for NaN lets the device run ahead. A checkpoint is only written after a look.
    """

    hooks: TrainerHooks
    model: PreTrainedModel

    def bind(self, hooks: TrainerHooks) -> None:
        """Attaches the pipeline's hooks; called once, right after construction."""
        self.hooks = hooks
        self.tokens_seen = 0
        self._token_count: Tensor | None = None
        self._pending: list[Watched] = []
        self.remove_callback(PrinterCallback)  # type: ignore[attr-defined]

    # -- numbers ---------------------------------------------------------------------------------------------

    def count_tokens(self, mask: Tensor) -> None:
        """Adds the number of ones in an attention mask, without waiting for the device."""
        total = mask.sum()
        self._token_count = total if self._token_count is None else self._token_count + total

    def take_token_count(self) -> int:
        """Tokens since the last call; waits for the device."""
        count = 0 if self._token_count is None else int(self._token_count.item())
        self._token_count = None
        self.tokens_seen += count
        return count

    def watch(self, name: str, value: Tensor) -> None:
        """Remembers a number of this step to be checked for NaN and infinity later."""
        step = self.state.global_step + 1  # type: ignore[attr-defined]
        self._pending.append(Watched.copy_of(step, name, value))

    def check_finite(self, *, before_step: int | None = None) -> None:
        """Raises FtcliError FT702 (exit 6) when a watched number of an earlier step is not finite."""
        due = [w for w in self._pending if before_step is None or w.step < before_step]
        self._pending = [w for w in self._pending if before_step is not None and w.step >= before_step]
        for watched in due:
            number = watched.number()
            if not math.isfinite(number):
                raise FtcliError.single(
                    "FT702",
                    f"{watched.name} is {number} at step {watched.step}: training has diverged",
                    exit_code=ExitCode.DIVERGED,
                    help="lower train.learning_rate, add train.warmup_steps, or lower train.max_grad_norm; the last "
                    "checkpoint was written before this step",
                )

    def _clip_grad_norm(self, model: torch.nn.Module) -> Tensor:
        norm: Tensor = super()._clip_grad_norm(model)  # type: ignore[misc]
        self.watch("the gradient norm", norm)
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: transformers' estimate walks over every parameter in every step; `ftcli bench` counts properly."""
        return 0

    # -- evaluation ------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The pipeline's token-weighted evaluation instead of transformers' mean over batches."""
        if self.hooks.evaluate is None:
            return {}
        model = self.model
        training = model.training
        model.eval()
        metrics = {f"eval_{name}": value for name, value in self.hooks.evaluate().items()}
        model.train(training)
        state = self.state  # type: ignore[attr-defined]
        self.control = self.callback_handler.on_evaluate(self.args, state, self.control, metrics)  # type: ignore[attr-defined,has-type]
        return metrics

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Writes adapters or weights, optimizer, schedule, random states and progress, then renames into place."""
        if self.hooks.checkpoints is None:
            return
        self.check_finite()
        if self.hooks.before_checkpoint is not None:
            self.hooks.before_checkpoint()
        self.take_token_count()
        state = self.state  # type: ignore[attr-defined]
        state.num_input_tokens_seen = self.tokens_seen
        with self.hooks.checkpoints.staging(state.global_step) as folder:
            save_weights(self.model, folder)
            self._save_optimizer_and_scheduler(str(folder))  # type: ignore[attr-defined]
            self._save_scaler(str(folder))  # type: ignore[attr-defined]
            self._save_rng_state(str(folder))  # type: ignore[attr-defined]
            self._export_callback_states()
            state.save_to_json(str(folder / TRAINER_STATE))
        self.hooks.checkpoints.rotate(self.hooks.keep_last)

    def _export_callback_states(self) -> None:
        state = self.state  # type: ignore[attr-defined]
        for callback in [*self.callback_handler.callbacks, self.control]:  # type: ignore[attr-defined]
            if isinstance(callback, ExportableState):
                state.stateful_callbacks[type(callback).__name__] = callback.state()


def save_weights(model: Any, folder: Path) -> None:
    """Writes an adapter in PEFT's layout or a model in transformers', safetensors in either case."""
    if hasattr(model, "peft_config"):
        # "auto" asks the Hub whether the vocabulary has grown; ftcli never resizes it.
        model.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        model.save_pretrained(str(folder))


NO_SAVING = {"save_strategy": SaveStrategy.NO, "push_to_hub": False, "report_to": "none"}
