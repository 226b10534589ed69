"""A trainer's part in a group of ranks: one batch each, gradients added up, and every decision made by all.

transformers and accelerate know nothing of the other ranks: to them each is a process of its own. What a rank computes
is what one process computes for one of several accumulated micro-batches; the sum over ranks takes the place of the
sum over micro-batches. So N ranks are the same run as one process that accumulates N times as many.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.train.parallel import SEED_SPREAD, GradientReducer, float_bits, float_of, numbers_agreed, require_alike

if TYPE_CHECKING:
    from ftcli.run.group import RankGroup

_NORM = "the gradient norm"


class TogetherMixin:
    """Mixed into a trainer before :class:`ftcli.trainers.base.RunTrainerMixin`; does nothing without a group.

    Attributes:
        group: The ranks that train together.
    """

    group: RankGroup | None = None
    _losses: list[Tensor]
    _last_norm = 0.0
    _reducer: GradientReducer | None = None

    # -- a step ----------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """This rank's batches of one step, once the ranks have held their last gradient norms against each other."""
        batches, items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self.group is not None and batches:
            size = numbers_agreed(len(batches), self.args.per_device_train_batch_size)  # type: ignore[attr-defined]
            agreed = self.group.agree("step begins", [float_bits(self._last_norm), *(0,) * (size - 1)])
            require_alike([float_of(row[0]) for row in agreed])
            self._losses = []
        return batches, items

    def begin_step(self) -> None:
        """As its base. What is drawn at random in this step depends on seed, step and rank alone, so that a run that is
        resumed draws the same."""
        super().begin_step()  # type: ignore[misc]
        if self.group is not None:
            step = self.args.seed * SEED_SPREAD + self.state.global_step  # type: ignore[attr-defined]
            torch.manual_seed((step * SEED_SPREAD + self.group.rank) % 2**63)

    def watch_loss(self, loss: Tensor) -> None:
        """Remembers the loss of a batch, to be checked for NaN and infinity later."""
        if self.group is None:
            super().watch_loss(loss)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one batch; after the last one of a step gradients and losses of all ranks."""
        with nullcontext() if self.group is None else self.group.exchanging():
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if self.group is None:
            return loss
        self._losses.append(loss)
        if len(self._losses) < len(self._rows):  # type: ignore[attr-defined]
            return torch.zeros_like(loss)
        return self._together(self.group)

    def _together(self, group: RankGroup) -> Tensor:
        """Adds up the gradients, and returns what is still to be added to the sum of the losses."""
        group.agree("step ends")
        if self._reducer is None:
            self._reducer = GradientReducer(self.model)  # type: ignore[attr-defined]
        self._reducer.reduce(group)
        slots = torch.zeros(len(self._losses) * group.size, device=self._losses[0].device)
        slots[group.rank :: group.size] = torch.stack(self._losses).float()
        group.add_up([slots])  # the others' places hold zeros: every loss arrives as it is, NaN included
        for index, loss in enumerate(slots):
            self.watch(f"the loss of rank {index % group.size}", loss, ())  # type: ignore[attr-defined]
        for loss in slots[:-1]:  # in the order in which one process would have computed them
            self._tr_loss += loss  # type: ignore[attr-defined]
        return slots[-1].clone()

    # -- decisions -------------------------------------------------------------------------------------------

    def check_finite(self, *, before_step: int | None = None) -> None:
        """As its base, on the same numbers on every rank: all raise, or none."""
        for watched in self._pending:  # type: ignore[attr-defined]
            if watched.name == _NORM and (before_step is None or watched.step < before_step):
                self._last_norm = watched.number()
        super().check_finite(before_step=before_step)  # type: ignore[misc]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Rank 0 writes for all."""
        if self.group is None or self.group.leads:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        self.check_finite()
        self.take_token_count()  # type: ignore[attr-defined]
        self.saved_step = self.state.global_step  # type: ignore[attr-defined]
