"""Gated linear units: ``h = act(gate) * up`` for silu (SwiGLU), gelu_tanh and gelu (GEGLU), and relu2.

Legend: M rows, F intermediate size, K padded LoRA rank.

    h  = act(g) * u
    dg = dh * u * act'(g)
    du = dh * act(g)

All in float32 with one rounding when stored. Backward reads g, u and dh, and rebuilds h, which is therefore not saved.

The same kernels carry the low-rank terms of a LoRA MLP, so that no term costs a pass over an (M, F) tensor of its own:

    forward     g = g0 + xa_g @ B_g.T       u = u0 + xa_u @ B_u.T       ha = h @ A_d.T
    backward    dh = dh0 + dya @ A_d        dxa_g = dg @ B_g            dxa_u = du @ B_u

g0 and u0 are the base projections; they are what is saved, and g and u are formed again in backward. Column sums (ha,
dxa) are float32 partial sums a program, added in a fixed order afterwards: nothing is atomic.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, accumulate_dtype, choose_backend
from ftkernels.glu_kernels import glu_backward, glu_forward
from ftkernels.limits import Activation

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def glu(gate: Tensor, up: Tensor, activation: Activation, *, backend: BackendName = "auto") -> Tensor:
    """``act(gate) * up``, contiguous, in the dtype the two promote to.

    Args:
        gate: (..., F); the last dimension contiguous and the rest one stride (a slice of a fused projection) is not
            copied.
        up: of ``gate``'s shape.
        activation: "silu", "gelu_tanh", "gelu" (erf) or "relu2" (relu squared).

    Raises:
        ValueError: shapes that differ, or an unknown activation.
    """
    _check(gate, up, activation)
    if not choose_backend(gate.device, backend).is_triton:
        return glu_reference(gate, up, activation)
    return _Glu.apply(gate, up, activation)


def swiglu(gate: Tensor, up: Tensor, *, backend: BackendName = "auto") -> Tensor:
    """``silu(gate) * up``; see ``glu``."""
    return glu(gate, up, "silu", backend=backend)


def geglu(
    gate: Tensor, up: Tensor, *, approximate: Literal["tanh", "none"] = "tanh", backend: BackendName = "auto"
) -> Tensor:
    """``gelu(gate) * up`` with the tanh form (Gemma) or the exact one; see ``glu``."""
    return glu(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu", backend=backend)


def glu_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The same in plain torch, differentiable; float32 inside (float64 for float64), one rounding."""
    dtype = torch.promote_types(gate.dtype, up.dtype)
    acc = accumulate_dtype(dtype)
    return (activation_reference(gate.to(acc), activation) * up.to(acc)).to(dtype)


def activation_reference(x: Tensor, activation: Activation) -> Tensor:
    """act(x) in plain torch."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def glu_backward_torch(dh: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """(dgate beside dup (M, 2 * F), h (M, F)) in dh's dtype, in plain torch without autograd. All inputs (M, F)."""
    acc = accumulate_dtype(dh.dtype)
    g, u, d = gate.to(acc), up.to(acc), dh.to(acc)
    value = activation_reference(g, activation)
    if activation == "silu":
        dg = torch.ops.aten.silu_backward(d * u, g)
    elif activation == "relu2":
        dg = d * u * 2.0 * F.relu(g)
    else:
        dg = torch.ops.aten.gelu_backward(d * u, g, approximate="tanh" if activation == "gelu_tanh" else "none")
    return torch.cat((dg, d * value), dim=1).to(dh.dtype), (value * u).to(dh.dtype)


class _Glu(torch.autograd.Function):
    """Saves gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        dtype = torch.promote_types(gate.dtype, up.dtype)
        h, _ = glu_forward(_matrix(gate, dtype), _matrix(up, dtype), activation)
        return h.view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dtype = dh.dtype
        gate_2d, up_2d = _matrix(gate, dtype), _matrix(up, dtype)
        d_both, _, _ = glu_backward(_matrix(dh, dtype).contiguous(), gate_2d, up_2d, ctx.activation)
        width = gate.shape[-1]
        return d_both[:, :width].view(gate.shape).to(gate.dtype), d_both[:, width:].view(up.shape).to(up.dtype), None


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, F) with a contiguous last dimension; a copy only where the strides need one."""
    x = x.to(dtype).reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]), dtype=dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    if gate.shape != up.shape or gate.dim() < 1:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} must have one shape")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
