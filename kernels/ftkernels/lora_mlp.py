"""A gated MLP of three frozen linear layers with LoRA adapters, and optionally the norm in front and the residual
behind.

Legend: M rows, H hidden size, F intermediate size, K padded rank. Derivation: docs/kernels.md.

    x = norm(z)  or  z
    g = x @ Wg.T + s_g * (x @ Ag.T) @ Bg.T
    u = x @ Wu.T + s_u * (x @ Au.T) @ Bu.T
    h = act(g) * u
    y = h @ Wd.T + s_d * (h @ Ad.T) @ Bd.T   (+ z, the residual)

Saved: z, rstd (M,), the base outputs of gate and up (M, 2F), xa (M, 2K), ha (M, K) and the packed adapters.
h, act(g), x and every adapter's output are formed again inside kernels that read what they need anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.glu import ACTIVATIONS, glu_backward_torch, glu_reference
from ftkernels.glu_kernels import Activation, GluLowRank, glu_backward, glu_forward
from ftkernels.lowrank import (
    Packed,
    Plan,
    adapter_input_grad,
    adapter_tensors,
    base_backward,
    base_forward,
    enter,
    group_backward,
    make_plan,
    pack,
    project,
)
from ftkernels.lowrank_add import lowrank_add
from ftkernels.projection import Norm, Projection, check_projection, norm_reference, project_reference

ResidualMode = Literal["none", "add", "return"]


def lora_mlp(
    z: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    activation: Activation = "silu",
    norm: Norm | None = None,
    residual: ResidualMode = "none",
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The MLP of the module docstring.

    Args:
        z: (..., H), the residual stream when ``norm`` is given.
        gate, up: (F, H) layers. One GEMM when their weights were joined (``join_weights``).
        down: (H', F) layer; H' = H when a residual is added.
        activation: see ``ftkernels.glu``.
        norm: applied to z first.
        residual: "add" gives ``z + mlp``; "return" gives ``(mlp, z)``, where using the second output instead of z
            itself
            lets backward add both gradients of z in one kernel; "none" gives ``mlp``.
        backend: see ``ftkernels.device.choose_backend``.

    Raises:
        ValueError: shapes that do not fit, a trainable or packed base weight, or an unknown option.
    """
    check_projection(gate, z.shape[-1], "gate")
    check_projection(up, z.shape[-1], "up")
    check_projection(down, gate.out_features, "down")
    if gate.out_features != up.out_features:
        raise ValueError(f"gate has {gate.out_features} output features, up {up.out_features}")
    if activation not in ACTIVATIONS or residual not in ("none", "add", "return"):
        raise ValueError(f"unknown activation {activation!r} or residual mode {residual!r}")
    if residual == "add" and down.out_features != z.shape[-1]:
        raise ValueError(f"down gives {down.out_features} features, the residual has {z.shape[-1]}")
    inner = make_plan(z, [gate, up], norm, backend)
    # The second half computes in the first half's dtype, whatever the dtype of down's weight.
    outer = replace(make_plan(z, [down], None, backend), dtype=inner.dtype)
    fused = inner.fused and outer.fused and not outer.drops
    weight = None if norm is None else norm.weight
    tensors = adapter_tensors([gate, up, down])
    y, passed = _LoraMlp.apply(inner, outer, activation, fused, residual, z, weight, *tensors)
    return (y, passed) if residual == "return" else y


def lora_mlp_reference(
    z: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    *,
    activation: Activation = "silu",
    norm: Norm | None = None,
    residual: ResidualMode = "none",
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch with torch's own autograd."""
    x = norm_reference(z, norm, gate, up)
    y = project_reference(glu_reference(project_reference(x, gate), project_reference(x, up), activation), down)
    if residual == "add":
        return z + y
    return (y, z) if residual == "return" else y


def _middle_forward(
    inner: Plan,
    outer: Plan,
    activation: Activation,
    fused: bool,
    gate_up: Tensor,
    xa: Tensor | None,
    packs: tuple[Packed, Packed],
) -> tuple[Tensor, Tensor | None]:
    """(h, ha) from the base outputs of gate and up; unfused, ``gate_up`` becomes the full outputs in place."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    first, second = packs
    if fused:
        low = _low_rank(first, second, xa)
        h, ha = glu_forward(gate, up, activation, low)
        if low is not None and low.a_down is not None:
            return h, None if ha is None else ha.to(inner.dtype)
        return h, project(outer, second, h)
    if xa is not None and first.b is not None:
        for index, columns in enumerate(inner.columns()):
            lowrank_add(gate_up[:, columns], xa[:, inner.ranks(index)], first.b[columns], None, triton_kernel=False)
    h = glu_forward(gate, up, activation)[0] if inner.triton else glu_reference(gate, up, activation)
    return h, project(outer, second, h)


def _low_rank(first: Packed, second: Packed, xa: Tensor | None) -> GluLowRank | None:
    """The low-rank terms that ride in the kernel; None when gate and up have none (down's then takes its own GEMM)."""
    if xa is None or first.b is None:
        return None
    return GluLowRank(xa, first.b, second.a)


class _LoraMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inner: Plan,
        outer: Plan,
        activation: Activation,
        fused: bool,
        residual: ResidualMode,
        z: Tensor,
        norm_weight: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        with without_autocast(z):
            z2 = z.reshape(-1, z.shape[-1])
            x, rstd = enter(inner, z2, norm_weight)
            first, second = pack(inner, z.device), pack(outer, z.device)
            xa = project(inner, first, x)
            gate_up = base_forward(inner, x)
            h, ha = _middle_forward(inner, outer, activation, fused, gate_up, xa, (first, second))
            added = z2 if residual == "add" else None
            y = lowrank_add(base_forward(outer, h), ha, second.b, added, triton_kernel=outer.fused)
        ctx.plans, ctx.activation, ctx.fused, ctx.residual = (inner, outer), activation, fused, residual
        ctx.z_shape, ctx.z_dtype = z.shape, z.dtype
        kept = z if norm_weight is not None else x
        ctx.save_for_backward(kept, norm_weight, rstd, gate_up, xa, ha, first.a, first.b, second.a, second.b)
        ctx.set_materialize_grads(False)
        return y.view(*z.shape[:-1], outer.out_features), z if residual == "return" else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_pass: Tensor | None) -> tuple[Any, ...]:
        inner, outer = ctx.plans
        x, norm_weight, rstd, gate_up, xa, ha, a1, b1, a2, b2 = ctx.saved_tensors
        wants_z, *wants = ctx.needs_input_grad[5:]
        if dy is None:  # only the returned residual was used
            return (None,) * 5 + (d_pass, *(None for _ in wants))
        with without_autocast(dy):
            dy2 = dy.reshape(-1, outer.out_features)
            d_pass2 = dy2 if ctx.residual == "add" else None
            if ctx.residual == "return" and d_pass is not None:
                d_pass2 = d_pass.reshape(-1, d_pass.shape[-1])
            dy2 = dy2.to(inner.dtype)
            middle = _middle_backward(ctx, dy2, gate_up, xa, ha, Packed(a1, b1), Packed(a2, b2), wants[5:])
            d_both, dxa, down_grads = middle
            grads = group_backward(
                inner,
                Packed(a1, b1),
                x=x.reshape(-1, x.shape[-1]),
                norm_weight=norm_weight,
                rstd=rstd,
                xa=xa,
                dy=d_both,
                dxa=dxa,
                d_pass=d_pass2,
                wants=[wants_z, *wants[:5]],
            )
        d_z = grads.dx.to(ctx.z_dtype).view(ctx.z_shape) if wants_z and grads.dx is not None else None
        d_norm = (
            None if grads.d_norm_weight is None or norm_weight is None else grads.d_norm_weight.to(norm_weight.dtype)
        )
        return None, None, None, None, None, d_z, d_norm, *grads.adapters, *down_grads


def _middle_backward(
    ctx: Any,
    dy: Tensor,
    gate_up: Tensor,
    xa: Tensor | None,
    ha: Tensor | None,
    first: Packed,
    second: Packed,
    wants: list[bool],
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """(dgate beside dup (M, 2F), dxa (M, 2K) float32 or None, [dA, dB] of down), from dy (M, H)."""
    inner, outer = ctx.plans
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    want_h = second.a is not None and any(wants)
    dya = None if second.b is None else adapter_input_grad(outer, second.b, dy)
    low = _low_rank(first, second, xa) if ctx.fused else None
    if low is not None:
        dh = base_backward(outer, dy, None)
        dya_low = None if dya is None else dya.to(inner.dtype)
        d_both, h, dxa = glu_backward(dh, gate, up, ctx.activation, lowrank=low, dya=dya_low, want_h=want_h)
    else:
        # Not fused: the saved gate and up are complete, and dh takes its delta from a GEMM.
        dh_grads = group_backward(
            outer,
            second,
            x=dy,
            norm_weight=None,
            rstd=None,
            xa=None,
            dy=dy,
            dxa=dya,
            d_pass=None,
            wants=[True, False, False, False],
        )
        assert dh_grads.dx is not None
        dxa = None
        if inner.triton:
            d_both, h, _ = glu_backward(dh_grads.dx, gate, up, ctx.activation, want_h=want_h)
        else:
            d_both, h = glu_backward_torch(dh_grads.dx, gate, up, ctx.activation)
    if second.a is None or h is None:
        return d_both, dxa, [None, None]
    down = group_backward(
        outer,
        second,
        x=h,
        norm_weight=None,
        rstd=None,
        xa=ha,
        dy=dy,
        dxa=dya,
        d_pass=None,
        wants=[False, False, *wants],
    )
    return d_both, dxa, down.adapters
