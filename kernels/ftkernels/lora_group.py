"""Linear layers that read one input, side by side: with LoRA adapters, or trained themselves, and the norm in front.

Legend: M rows, I input features, N output features of all P projections, K padded rank. Derivation:
``ftkernels.lowrank`` and kernels/README.md.

    x = norm(z)  or  z
    y = [x @ W_p.T + bias_p + s_p * (x @ A_p.T) @ B_p.T  for each projection p]         (M, N), one behind the other

Saved: z, rstd (M,), xa (M, P * K) and the packed adapters. Never: x behind a norm, y.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.gemm import lowrank_add
from ftkernels.lowrank import enter_base, group_backward, products
from ftkernels.lowrank_plan import GroupPlan, Packed, adapter_tensors, make_plan
from ftkernels.projection import (
    Norm,
    Projection,
    check_projection,
    norm_reference,
    project_reference,
    weight_tensors,
)


class GroupOutput(NamedTuple):
    """The outputs side by side (..., N), and z again for the residual connection."""

    y: Tensor
    residual: Tensor


def lora_group(
    z: Tensor, projections: Sequence[Projection], *, norm: Norm | None = None, backend: BackendName = "auto"
) -> GroupOutput:
    """The outputs of ``projections`` side by side.

    Args:
        z: (..., I), the residual stream when ``norm`` is given.
        projections: (O_p, I) layers. One GEMM when their weights were joined (``join_weights``).
        norm: applied to z first.

    Returns:
        ``GroupOutput``, contiguous, in the products' dtype. Using ``residual`` for the residual connection instead of
        z itself lets backward add both gradients of z in one kernel.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    for index, projection in enumerate(projections):
        check_projection(projection, z.shape[-1], f"projection {index}")
    plan = make_plan(z, list(projections), norm, backend)
    trained = (*adapter_tensors(projections), *weight_tensors(projections))
    return GroupOutput(*_LoraGroup.apply(plan, z, None if norm is None else norm.weight, *trained))


def lora_group_reference(z: Tensor, projections: Sequence[Projection], *, norm: Norm | None = None) -> GroupOutput:
    """The same in plain torch with torch's own autograd."""
    x = norm_reference(z, norm, *projections)
    return GroupOutput(torch.cat([project_reference(x, p) for p in projections], dim=-1), z)


class _LoraGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: GroupPlan, z: Tensor, norm_weight: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(z):
            x, rstd, rows = enter_base(plan, z.reshape(-1, z.shape[-1]), norm_weight)
            y, packed, xa = products(plan, x, rows)
            if xa is not None and packed.b is not None:
                for index, c in enumerate(plan.columns()):
                    lowrank_add(y[:, c], xa[:, plan.ranks(index)], packed.b[c], None, triton_kernel=plan.fused)
        ctx.plan, ctx.z_shape, ctx.z_dtype = plan, z.shape, z.dtype
        ctx.save_for_backward(z if plan.norm_form is not None else x, norm_weight, rstd, xa, packed.a, packed.b)
        ctx.set_materialize_grads(False)
        return y.view(*z.shape[:-1], plan.out_features), z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_pass: Tensor | None) -> tuple[Any, ...]:
        plan: GroupPlan = ctx.plan
        if dy is None:  # only the returned residual was used
            return None, d_pass, *(None for _ in ctx.needs_input_grad[2:])
        x, norm_weight, rstd, xa, a, b = ctx.saved_tensors
        _, wants_z, *wants = ctx.needs_input_grad
        with without_autocast(dy):
            grads = group_backward(
                plan,
                Packed(a, b),
                x=x.reshape(-1, x.shape[-1]),
                norm_weight=norm_weight,
                rstd=rstd,
                xa=xa,
                dy=dy.reshape(-1, plan.out_features).to(plan.dtype),
                dxa=None,
                d_pass=None if d_pass is None else d_pass.reshape(-1, d_pass.shape[-1]),
                wants=[wants_z, *wants],
            )
        d_z, d_norm = grads.of_inputs(ctx.z_dtype, ctx.z_shape, norm_weight, wants_z=wants_z)
        return None, d_z, d_norm, *grads.both
