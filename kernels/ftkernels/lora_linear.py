"""A frozen linear layer with its LoRA adapter, and optionally the norm in front of it and the residual behind it.

Legend: M rows, I input features, O output features, K padded rank. Derivation: ``ftkernels.lowrank`` and
docs/kernels.md.

    x = norm(z)  or  z
    y = x @ W.T + bias + s * (x @ A.T) @ B.T + residual

Saved: z, rstd (M,), xa (M, K) and the packed adapters. Never: x behind a norm, the base output, the adapter's output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.lowrank import (
    Packed,
    Plan,
    adapter_tensors,
    enter,
    group_backward,
    make_plan,
    products,
)
from ftkernels.lowrank_add import lowrank_add
from ftkernels.projection import Norm, Projection, check_projection, norm_reference, project_reference


def lora_linear(
    z: Tensor,
    projection: Projection,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """``norm(z) @ W.T + bias + s * (dropout(norm(z)) @ A.T) @ B.T + residual``.

    Args:
        z: (..., I).
        projection: the layer; see ``Projection``. Under autocast the products are in its dtype, else in the dtype
            that z and
            W promote to; the adapter's own dtype never widens them.
        norm: applied to z first.
        residual: (..., O), added in float32 before the one rounding.
        backend: see ``ftkernels.device.choose_backend``.

    Returns:
        (..., O) in the products' dtype, promoted with the residual's.

    Raises:
        ValueError: shapes that do not fit, or a trainable or packed base weight.
    """
    check_projection(projection, z.shape[-1], "projection")
    if residual is not None and residual.shape != (*z.shape[:-1], projection.out_features):
        raise ValueError(f"residual {tuple(residual.shape)} does not fit z {tuple(z.shape)}")
    plan = make_plan(z, [projection], norm, backend)
    weight = None if norm is None else norm.weight
    return _LoraLinear.apply(plan, z, residual, weight, *adapter_tensors([projection]))


def lora_linear_reference(
    z: Tensor, projection: Projection, *, norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """The same in plain torch with torch's own autograd."""
    y = project_reference(norm_reference(z, norm, projection), projection)
    return y if residual is None else residual + y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, z: Tensor, residual: Tensor | None, norm_weight: Tensor | None, *_: Tensor | None
    ) -> Tensor:
        with without_autocast(z):
            z2 = z.reshape(-1, z.shape[-1])
            x, rstd = enter(plan, z2, norm_weight)
            y, packed, xa = products(plan, x)
            res2 = None if residual is None else residual.reshape(-1, residual.shape[-1])
            y = lowrank_add(y, xa, packed.b, res2, triton_kernel=plan.fused)
        ctx.plan, ctx.z_shape, ctx.z_dtype = plan, z.shape, z.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.save_for_backward(z if norm_weight is not None else x, norm_weight, rstd, xa, packed.a, packed.b)
        return y.view(*z.shape[:-1], plan.out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        x, norm_weight, rstd, xa, a, b = ctx.saved_tensors
        _, wants_z, wants_residual, *wants = ctx.needs_input_grad
        with without_autocast(dy):
            dy2 = dy.reshape(-1, plan.out_features).to(plan.dtype)
            grads = group_backward(
                plan,
                Packed(a, b),
                x=x.reshape(-1, x.shape[-1]),
                norm_weight=norm_weight,
                rstd=rstd,
                xa=xa,
                dy=dy2,
                dxa=None,
                d_pass=None,
                wants=[wants_z, *wants],
            )
        d_z = grads.dx.to(ctx.z_dtype).view(ctx.z_shape) if wants_z and grads.dx is not None else None
        d_norm = (
            None if grads.d_norm_weight is None or norm_weight is None else grads.d_norm_weight.to(norm_weight.dtype)
        )
        return None, d_z, dy.to(ctx.residual_dtype) if wants_residual else None, d_norm, *grads.adapters
