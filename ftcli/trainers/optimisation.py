"""The optimizer and schedule of :mod:`ftcli.train.optimizer` in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.config.training import TrainConfig
from ftcli.facts.precision import DtypePlan
from ftcli.model.rows import own
from ftcli.model.saved import load_weights
from ftcli.tables import optimizers, schedules
from ftcli.train.adamw import AdamW
from ftcli.train.optimizer import (
    clipping,
    follow_weights,
    load_training_weights,
    make_optimizer,
    make_schedule,
    save_training_weights,
    total_norm,
)

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedModel

    from ftcli.model.stack import DecoderStack


class OptimisationMixin:
    """Mixed into transformers' Trainer. ``settings``, ``plan``, ``own_optimizer`` (``Setup.own_optimizer``: our form of
    the recipe's optimizer is taken) and ``stack`` are set before training begins.
    """

    settings: TrainConfig
    plan: DtypePlan
    own_optimizer: bool
    stack: DecoderStack | None
    model: PreTrainedModel
    optimizer: Any
    lr_scheduler: Any
    args: Any
    is_settled = False

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The recipe's optimizer."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.settings, self.plan, self.own_optimizer, self.args)
            follow_weights(self.optimizer, self.stack)
        made: Optimizer = self.optimizer
        return made

    def clip_in_step(self) -> Tensor | None:
        """The norm of all gradients, where the optimizer clips them itself as it reads them; else None."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, AdamW):
            return None
        norm = total_norm([own(p.grad) for p in self.model.parameters() if p.grad is not None])
        optimizer.clip = clipping(norm, self.settings.max_grad_norm)
        return norm

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """As :func:`make_schedule`."""
        if self.lr_scheduler is None:
            made = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = make_schedule(made, self.settings, num_training_steps)
            self._created_lr_scheduler = True
        scheduler: LRScheduler = self.lr_scheduler
        return scheduler

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        # transformers steps schedules here by a metric that its own arguments name.
        metrics: dict[str, float] = self.evaluate()  # type: ignore[attr-defined]
        return metrics

    def schedule_by(self, value: float | None) -> None:
        """Tells a schedule that looks at evaluations what one has measured: the smaller the better."""
        if schedules.row(self.settings.lr_scheduler_type).by_evaluations and value is not None:
            self.lr_scheduler.step(value)

    # -- weights that are evaluated --------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.model, Path(resume_from_checkpoint))

    @property
    def _averages(self) -> bool:
        row = optimizers.row(self.settings.optim)
        return row.schedule_free and self.optimizer is not None and not self.is_settled

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """As :meth:`ftcli.train.optimizer.Optimization.evaluated_weights`."""
        if not self._averages:
            yield
            return
        training = [(p, p.detach().clone()) for p in self.model.parameters() if p.requires_grad]
        self.optimizer.eval()
        try:
            yield
        finally:
            self.optimizer.train()
            with torch.no_grad():
                for parameter, value in training:
                    parameter.copy_(value)

    def whole_weights(self) -> None:
        """Nothing: no weights are sharded."""

    def settle(self) -> None:
        """Training is over: the model keeps the weights that are to be evaluated."""
        if self._averages:
            self.optimizer.eval()
        self.is_settled = True

    def save_training_weights(self, folder: Path) -> None:
        """Writes the weights that training goes on with, where :meth:`evaluated_weights` are others."""
        if self._averages:
            save_training_weights(self._trained(), folder)

    def load_training_weights(self, folder: Path) -> None:
        """Takes what :meth:`save_training_weights` wrote, if anything. Raises ValueError where it does not fit."""
        load_training_weights(self._trained(), folder)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
