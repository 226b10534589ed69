"""Muon for hidden matrices with AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NotRequired, TypedDict

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.optimizer import StateDict


class ParameterGroup(TypedDict):
    """A parameter group: what optimizers take, and whether its parameters are hidden matrices."""

    params: Sequence[Tensor]
    weight_decay: float
    hidden: bool
    lr: NotRequired[float]


class MuonWithAdamW(Optimizer):
    """torch's Muon for the parameter groups that are marked ``hidden``, torch's AdamW for the others.

    Muon's step is scaled to the size that AdamW's steps have (``match_rms_adamw``), so that one learning rate and one
    weight decay serve both. The groups are those of the two optimizers, not copies: schedules change what these read.

    Args:
        params: Groups with ``params``, ``weight_decay``, ``hidden`` and, where it differs from ``lr``, ``lr``.
        lr, betas, eps: Of AdamW. Of Muon the learning rate alone.
    """

    def __init__(
        self, params: Iterable[ParameterGroup], lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        groups = [dict(group) for group in params if group["params"]]
        self._parts: dict[str, Optimizer] = {}
        hidden = [group for group in groups if group["hidden"]]
        others = [group for group in groups if not group["hidden"]]
        if hidden:
            self._parts["muon"] = Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
        if others:
            self._parts["adamw"] = AdamW(others, lr=lr, betas=betas, eps=eps)
        super().__init__(groups, {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        self.param_groups = [group for part in self._parts.values() for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts.values():
            part.step()
        return loss

    def state_dict(self) -> StateDict:
        """The states of both, by ``muon`` and ``adamw``."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes what :meth:`state_dict` gave. Raises KeyError or ValueError for that of another optimizer."""
        for name, part in self._parts.items():
            part.load_state_dict(state_dict[name])
        self._share_groups()
