"""Training of weights that are spread over ranks: full fine-tuning under ``launch.engine: fsdp``.

A backward pass leaves each rank the sums of its own rows' gradients, and the optimizer keeps state for those alone. The
norm of all gradients, checkpoints and results are put together of all ranks' rows. What is written is what one process
would have written, so that any number of ranks can go on from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ftcli.model.backbone import root_of
from ftcli.model.rows import copies_of, put_away, take_rows, trained_is_spread, whole_as, whole_weights
from ftcli.model.saved import stored_weights
from ftcli.trainers.adamw import AdamW
from ftcli.trainers.checkpoint_state import readable

if TYPE_CHECKING:
    from ftcli.run.group import RankGroup


class SpreadMixin:
    """Mixed into a trainer before :class:`ftcli.trainers.together.TogetherMixin`; does nothing unless weights that are
    trained are spread.
    """

    group: RankGroup | None
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _spreads: bool | None = None
    _copies: int = 1

    @property
    def spreads(self) -> bool:
        """Whether they are."""
        if self._spreads is None:
            self._spreads = trained_is_spread(self.model)
            self._copies = copies_of(self.model)
        return self._spreads

    def _reduce(self, group: RankGroup) -> None:
        if not self.spreads:  # backward has added them up
            super()._reduce(group)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As its base. Copies of the weights add up their gradients once a step."""
        if self.spreads and self._copies > 1:
            root: Any = root_of(self.model)
            root.set_requires_all_reduce(self._micro_batches_left == 1)  # type: ignore[attr-defined]
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return loss

    def norm_of_all(self, norm: Tensor) -> Tensor:
        """The norm of all ranks' rows of the gradients, from that of this one's."""
        if not self.spreads or self.group is None:
            return norm
        square = norm.double() ** 2
        if self.group.rank >= self.group.size // self._copies:  # the same numbers as those of the first copy
            square.zero_()
        with self.group.exchanging():
            self.group.add_up([square])
        return square.sqrt().to(norm.dtype)

    # -- checkpoints and results -----------------------------------------------------------------------------

    def whole_weights(self) -> dict[str, Tensor] | None:
        """What is trained, put together on rank 0's host; None on the others, and where nothing is spread."""
        if not self.spreads or self.group is None:
            return None
        with self.group.exchanging():
            return whole_weights(self.model, wanted=self.group.leads)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.spreads:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = self._whole_state()
        torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
        torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _whole_state(self) -> Any:
        """The optimizer's state as that of one process; None on ranks that do not lead. All ranks call this."""
        assert self.group is not None
        leads, own = self.group.leads, self._own_optimizer()
        state = own.state_dict()
        parameters = [p for group in own.param_groups for p in group["params"]]
        whole: dict[int, dict[str, Any]] = {}
        with self.group.exchanging():
            for index, kept in state["state"].items():
                like = parameters[index]
                found = {k: whole_as(v, like, wanted=leads) if isinstance(v, Tensor) else v for k, v in kept.items()}
                whole[index] = found if leads else {}
        return {**state, "state": whole} if leads else None

    def _own_optimizer(self) -> AdamW:
        found = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(found, AdamW)  # preflight refuses the others
        return found

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        put_away(self.model)  # as reading a state dict does, which rank 0 alone may do: all have to stay in step
        if self.spreads and self.group is not None and not self.group.leads:
            self.check_finite()  # type: ignore[attr-defined]
            self.whole_weights()
            self._whole_state()
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def rescue(self) -> int | None:
        """As its base; None where a part of what is trained is with ranks that may be gone.

        Adapters are on every rank, and behind nothing that waits for another one once connections are cut.
        """
        if self.spreads:
            return None
        if self.group is not None and root_of(self.model) is not None:
            self.group.cut()
        step: int | None = super().rescue()  # type: ignore[misc]
        return step

    # -- going on --------------------------------------------------------------------------------------------

    def take_weights(self, folder: Path) -> None:
        """Loads this rank's rows of the weights that lie in a checkpoint or a result."""
        if not self.spreads:
            super().take_weights(folder)  # type: ignore[misc]
            return
        with readable(str(folder)):
            take_rows(self.model, dict(stored_weights(folder)))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.spreads:
            self.take_weights(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.spreads or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        with readable(checkpoint):
            # Mapped: of what is stored each rank reads its own rows.
            state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
            self.optimizer.load_state_dict(state)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def settle(self) -> None:
        """Training is over."""
        super().settle()  # type: ignore[misc]
        put_away(self.model)
