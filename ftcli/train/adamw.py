"""Optimizers that torch has not: AdamW in one kernel for full fine-tuning, and Muon with AdamW as one.

The kernel serves parameters in float32 with copies in the compute dtype, which it writes as well, and parameters in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch
from ftkernels.adamw import AdamWSettings, Moment8, Rounding, adamw_step, adamw_step_8bit
from torch import Tensor
from torch.optim import Muon, Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from ftcli.model.shards import local_shard, shard_like, shard_rank
from ftcli.plan.trained import SMALLEST_IN_8_BITS

#: What the state calls the moments, and what is appended for the scales of those in 8 bits.
MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALES = "_scales"
#: Between the places of parameters that ranks share: more than a model has of them.
_RANKS_APART = 1_000_003


class AdamW(Optimizer):
    """AdamW with arithmetic and moments in float32, whatever parameters and gradients are in. The formula is that of
    :mod:`ftkernels.adamw`.

    ``clip``, a scalar on the device, multiplies the gradients of the next step. ``copies`` has for a parameter the
    tensor that takes its new value in another dtype.

    Of a parameter that is sharded over ranks each rank keeps state for its rows, and changes those.

    Args:
        params: Parameters or groups of them.
        rounding: How a new value is rounded to the parameter's dtype. What is drawn for stochastic rounding depends on
            the step and on the parameter's place among all: a resumed run draws what it would have drawn.
            Parameters in float32 are not rounded.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        rounding: Rounding,
    ) -> None:
        self._rounding = rounding
        self.clip: Tensor | None = None
        self.copies: Mapping[Tensor, Tensor] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place += 1
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, place)
        self.clip = None
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], place: int) -> None:
        state, rows = self.state[parameter], local_shard(parameter)
        if not state:
            state.update({"step": 0, **self._no_moments(rows, group)})
        state["step"] += 1
        if not rows.numel():
            return
        settings = self._settings(parameter, group, state["step"], place + _RANKS_APART * shard_rank(parameter))
        self._step(rows, local_shard(gradient), state, settings, self.copies.get(parameter))

    def _no_moments(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The initial state besides ``step``."""
        made = (torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device) for _ in MOMENTS)
        return dict(zip(MOMENTS, made, strict=True))

    def _step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        settings: AdamWSettings,
        copy: Tensor | None,
    ) -> None:
        moments = state["exp_avg"], state["exp_avg_sq"]
        adamw_step(parameter, gradient, *moments, settings, clip=self.clip, copy=copy)

    def _settings(self, parameter: Tensor, group: dict[str, Any], step: int, place: int) -> AdamWSettings:
        return AdamWSettings(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=step,
            rounding=self._rounding if parameter.dtype == torch.bfloat16 else "nearest",
            seed=_seed(step, place),
        )

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes what ``state_dict`` gave, to the last bit. torch's own would cast the moments to the parameters' dtype.

        Raises ValueError for the state of other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            wanted = self._kept(saved)
            if not wanted <= saved.keys() or any(saved[name].shape != parameter.shape for name in MOMENTS):
                raise ValueError(f"state that is not of this optimizer for a parameter of {tuple(parameter.shape)}")
            moved = {
                name: shard_like(saved[name], parameter).to(
                    parameter.device, None if saved[name].dtype == torch.uint8 else torch.float32, copy=True
                )
                for name in wanted
            }
            self.state[parameter] = {"step": int(saved["step"]), **moved}

    def _kept(self, saved: dict[str, Any]) -> set[str]:
        """The tensors of a parameter's state."""
        return set(MOMENTS)


class AdamW8bit(AdamW):
    """The same with moments in 8 bits, in blocks with a scale each: those of the matrices of groups that say
    ``hidden``, the small ones excepted. Not those of embeddings, whose rows differ too much in how often they are
    trained. The arithmetic is in float32, and parameters are rounded to nearest.
    """

    def _no_moments(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["hidden"] or parameter.numel() < SMALLEST_IN_8_BITS:
            return super()._no_moments(parameter, group)
        found: dict[str, Tensor] = {}
        for name, signed in zip(MOMENTS, (True, False), strict=True):
            moment = Moment8.zeros(parameter, signed=signed)
            found |= {name: moment.codes, f"{name}{_SCALES}": moment.scales}
        return found

    def _step(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        settings: AdamWSettings,
        copy: Tensor | None,
    ) -> None:
        if MOMENTS[0] + _SCALES not in state:
            super()._step(parameter, gradient, state, settings, copy)
            return
        m, v = (Moment8(state[name], state[f"{name}{_SCALES}"]) for name in MOMENTS)
        adamw_step_8bit(parameter, gradient, m, v, settings, clip=self.clip, copy=copy)

    def _kept(self, saved: dict[str, Any]) -> set[str]:
        in_8_bits = any(name in saved and saved[name].dtype == torch.uint8 for name in MOMENTS)
        return {*MOMENTS, *(f"{name}{_SCALES}" for name in MOMENTS)} if in_8_bits else set(MOMENTS)


def _seed(step: int, place: int) -> int:
    """Below 2^31, far from those of other steps and parameters."""
    mixed = (step * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03) % 2**64
    return (mixed ^ (mixed >> 32)) % 2**31


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
            self._parts["adamw"] = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps)
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
