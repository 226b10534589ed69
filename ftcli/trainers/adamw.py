"""AdamW in one kernel for full fine-tuning: for parameters in float32 with copies in the compute dtype, which it writes
as well, and for parameters in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from ftkernels.adamw import AdamWSettings, Rounding, adamw_step
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict


class AdamW(Optimizer):
    """AdamW with arithmetic and moments in float32, whatever parameters and gradients are in. The formula is that of
    :mod:`ftkernels.adamw`.

    ``clip``, a scalar on the device, multiplies the gradients of the next step. ``copies`` has for a parameter the
    tensor that takes its new value in another dtype.

    Args:
        params: Parameters or groups of them.
        rounding: How a new value is rounded to the parameter's dtype. What is drawn for stochastic rounding depends on
            the step and on the parameter's place among all: a run that goes on draws what it would have drawn.
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
        """One step."""
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
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
        state["step"] += 1
        settings = AdamWSettings(
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            step=state["step"],
            rounding=self._rounding if parameter.dtype == torch.bfloat16 else "nearest",
            seed=_seed(state["step"], place),
        )
        moments = state["exp_avg"], state["exp_avg_sq"]
        adamw_step(parameter, gradient, *moments, settings, clip=self.clip, copy=self.copies.get(parameter))

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Takes what ``state_dict`` gave, to the last bit. torch's own would cast the moments to the parameters' dtype.

        Raises ValueError for the state of other parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            if saved["exp_avg"].shape != parameter.shape:
                raise ValueError(f"state of shape {tuple(saved['exp_avg'].shape)} for {tuple(parameter.shape)}")
            self.state[parameter] = {
                "step": int(saved["step"]),
                **{name: saved[name].to(parameter.device, torch.float32) for name in ("exp_avg", "exp_avg_sq")},
            }


def _seed(step: int, place: int) -> int:
    """Below 2^31, far from those of other steps and parameters."""
    mixed = (step * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03) % 2**64
    return (mixed ^ (mixed >> 32)) % 2**31
