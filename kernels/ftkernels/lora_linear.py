"""A linear layer with its LoRA adapter, or trained itself, and optionally the norm in front of it and the residual
behind it.

Legend: M rows, I input features, O output features, K padded rank. Derivation: ``ftkernels.lowrank`` and
kernels/README.md.

    x = norm(z)  or  z
    y = m * (x @ W.T + bias + s * (x @ A.T) @ B.T) + residual           m = 1 in all but Granite and its like

Saved: z, rstd (M,), xa (M, K) and the packed adapters; with ``save="input"`` z alone. Never: x behind a norm, the
base output, the adapter's output.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.early import EarlySave
from ftkernels.gemm import lowrank_add
from ftkernels.lowrank import enter, enter_base, group_backward, products, project
from ftkernels.lowrank_plan import GroupPlan, Packed, adapter_tensors, make_plan, pack_adapters
from ftkernels.projection import (
    Norm,
    Projection,
    check_projection,
    norm_reference,
    project_reference,
    weight_tensors,
)


def lora_linear(
    z: Tensor,
    projection: Projection,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
    save: Literal["products", "input"] = "products",
    backend: BackendName = "auto",
) -> Tensor:
    """``scale * (norm(z) @ W.T + bias + s * (dropout(norm(z)) @ A.T) @ B.T) + residual``.

    Args:
        z: (..., I).
        projection: the layer; see ``Projection``. Under autocast the products are in autocast's dtype, else in the
            one that z and W promote to; the adapter's own dtype never widens them.
        norm: applied to z first.
        residual: (..., O), added in float32 before the one rounding.
        scale: m, of what is added to a residual.
        save: "products" saves what the module docstring lists. "input" saves z alone, before anything is computed: a
            checkpoint then stops in front of the product, and backward computes the small rest again. Both give the
            same bits.

    Returns:
        (..., O) in the products' dtype, promoted with the residual's.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, one that is trained beneath an adapter, a scale
            without a residual, or an unknown save mode.
    """
    check_projection(projection, z.shape[-1], "projection")
    if residual is not None and residual.shape != (*z.shape[:-1], projection.out_features):
        raise ValueError(f"residual {tuple(residual.shape)} does not fit z {tuple(z.shape)}")
    if residual is None and scale != 1.0:
        raise ValueError(f"scale {scale} is of what is added to a residual, and there is none")
    if save not in ("products", "input"):
        raise ValueError(f"unknown save mode {save!r}")
    plan = make_plan(z, [projection], norm, backend)
    weight = None if norm is None else norm.weight
    early = EarlySave() if save == "input" else None
    if early is not None:
        z = early.save(z)
    trained = (*adapter_tensors([projection]), *weight_tensors([projection]))
    return _LoraLinear.apply(plan, early, scale, z, residual, weight, *trained)


def lora_linear_reference(
    z: Tensor,
    projection: Projection,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """The same in plain torch with torch's own autograd."""
    y = project_reference(norm_reference(z, norm, projection), projection)
    return y if residual is None else residual + scale * y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: GroupPlan,
        early: EarlySave | None,
        scale: float,
        z: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *_: Tensor | None,
    ) -> Tensor:
        with without_autocast(z):
            x, rstd, rows = enter_base(plan, z.reshape(-1, z.shape[-1]), norm_weight)
            y, packed, xa = products(plan, x, rows)
            res2 = None if residual is None else residual.reshape(-1, residual.shape[-1])
            y = lowrank_add(y, xa, packed.b, res2, triton_kernel=plan.fused, scale=scale)
        ctx.plan, ctx.scale, ctx.z_shape, ctx.z_dtype = plan, scale, z.shape, z.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.early = early
        if early is not None:
            ctx.norm_weight = None if norm_weight is None else norm_weight.detach()
        else:
            ctx.save_for_backward(z if plan.norm_form is not None else x, norm_weight, rstd, xa, packed.a, packed.b)
        return y.view(*z.shape[:-1], plan.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: GroupPlan = ctx.plan
        _, _, _, wants_z, wants_residual, *wants = ctx.needs_input_grad
        entered = None
        with without_autocast(dy):
            if ctx.early is None:
                x, norm_weight, rstd, xa, a, b = ctx.saved_tensors
                packed = Packed(a, b)
            else:
                z, norm_weight = ctx.early.tensor(), ctx.norm_weight
                entered, rstd, packed, xa = _form(plan, z, norm_weight)
                x = entered if plan.norm_form is None else z
            dy2 = dy.reshape(-1, plan.out_features)
            dy2 = (dy2 if ctx.scale == 1.0 else dy2 * ctx.scale).to(plan.dtype)
            grads = group_backward(
                plan,
                packed,
                x=x.reshape(-1, x.shape[-1]),
                norm_weight=norm_weight,
                rstd=rstd,
                xa=xa,
                dy=dy2,
                dxa=None,
                d_pass=None,
                wants=[wants_z, *wants],
                entered=entered,
            )
        d_z, d_norm = grads.of_inputs(ctx.z_dtype, ctx.z_shape, norm_weight, wants_z=wants_z)
        return None, None, None, d_z, dy.to(ctx.residual_dtype) if wants_residual else None, d_norm, *grads.both


def _form(
    plan: GroupPlan, z: Tensor, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor | None, Packed, Tensor | None]:
    """(x (M, I), rstd, packed adapters, xa): all that backward needs and that takes no base product."""
    x, rstd = enter(plan, z.reshape(-1, z.shape[-1]), norm_weight)
    packed = pack_adapters(plan, z.device)
    return x, rstd, packed, project(plan, packed, x)
