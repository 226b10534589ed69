"""The q, k and v projections of one attention layer with LoRA adapters, or trained themselves, the norm in front and
the rotary embedding behind.

Legend: B batch, S sequence, I input features, Hq and Hk heads, D head size. Derivation: docs/kernels.md.

    x = norm(z)  or  z
    q, k, v = x @ W.T + bias + s * (x @ A.T) @ B.T      each with its own W, bias, s, A, B
    q, k = rope(q), rope(k)                             where a rotary embedding is given

Saved: z, rstd, xa (B*S, 3K), the packed adapters, cos and sin. q, k and v are views of one buffer, which this backward
does not need; attention saves them for its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.lowrank import enter_base, group_backward, products
from ftkernels.lowrank_add import lowrank_add
from ftkernels.lowrank_plan import Packed, Plan, adapter_tensors, make_plan
from ftkernels.projection import (
    Norm,
    Projection,
    check_projection,
    norm_reference,
    project_reference,
    weight_tensors,
)
from ftkernels.qkv_rope import Rotary, qkv_rope_backward, qkv_rope_forward
from ftkernels.rope import apply_rope, apply_rope_reference


class QKV(NamedTuple):
    """q (B, Hq, S, D), k and v (B, Hk, S, D), and z again for the residual connection."""

    q: Tensor
    k: Tensor
    v: Tensor
    residual: Tensor


def lora_qkv(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    backend: BackendName = "auto",
) -> QKV:
    """Queries, keys and values of the module docstring, in the layout that attention takes.

    Args:
        z: (B, S, I), the residual stream when ``norm`` is given.
        q: (Hq * D, I) layer; k, v: (Hk * D, I) layers. One GEMM when their weights were joined (``join_weights``).
        head_dim: D.
        norm: applied to z first.
        rope: (cos, sin), each (B or 1, S, R). None leaves q and k unrotated, for models that normalise heads first.
        backend: see ``ftkernels.device.choose_backend``.

    Returns:
        ``QKV``; q, k and v are strided views with a contiguous last dimension. Using ``residual`` for the residual
        connection instead of z itself lets backward add both gradients of z in one kernel.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    if z.dim() != 3:
        raise ValueError(f"expected z (B, S, I), got {tuple(z.shape)}")
    for name, p in (("q", q), ("k", k), ("v", v)):
        check_projection(p, z.shape[-1], name)
    if q.out_features % head_dim or k.out_features % head_dim or k.out_features != v.out_features:
        raise ValueError(
            f"{q.out_features}, {k.out_features}, {v.out_features} features do not make heads of {head_dim}"
        )
    plan = make_plan(z, [q, k, v], norm, backend)
    cos = sin = None
    if rope is not None:
        cos, sin = rope
        wanted = ((1, z.shape[0]), z.shape[1], head_dim)
        if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in wanted[0] or cos.shape[1] != wanted[1]:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit z {tuple(z.shape)}")
        if not (plan.fused and cos.shape[-1] == head_dim and cos.stride(-1) == sin.stride(-1) == 1):
            # Ranks too large for the kernel, or heads rotated in part: the rotation is an operation of its own.
            bare = lora_qkv(z, q, k, v, head_dim=head_dim, norm=norm, backend=backend)
            turned_q, turned_k = apply_rope(bare.q, bare.k, cos, sin, backend=backend)
            return QKV(turned_q, turned_k, bare.v, bare.residual)
    weight = None if norm is None else norm.weight
    trained = (*adapter_tensors([q, k, v]), *weight_tensors([q, k, v]))
    return QKV(*_LoraQkv.apply(plan, head_dim, z, weight, cos, sin, *trained))


def lora_qkv_reference(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
) -> QKV:
    """The same in plain torch with torch's own autograd."""
    x = norm_reference(z, norm, q, k, v)
    heads = [project_reference(x, p).unflatten(-1, (-1, head_dim)).transpose(1, 2) for p in (q, k, v)]
    if rope is not None:
        heads[0], heads[1] = apply_rope_reference(heads[0], heads[1], *rope)
    return QKV(heads[0], heads[1], heads[2], z)


class _LoraQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        head_dim: int,
        z: Tensor,
        norm_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor, ...]:
        batch, seq_len = z.shape[:2]
        columns = plan.columns()
        with without_autocast(z):
            z2 = z.reshape(-1, z.shape[-1])
            x, rstd, rows = enter_base(plan, z2, norm_weight)
            y, packed, xa = products(plan, x, rows)
            if cos is not None and sin is not None:
                y = qkv_rope_forward(y, xa, packed.b, _rotary(plan, cos, sin, head_dim))
            elif xa is not None and packed.b is not None:
                for index, c in enumerate(columns):
                    lowrank_add(y[:, c], xa[:, plan.ranks(index)], packed.b[c], None, triton_kernel=plan.fused)
        ctx.plan, ctx.head_dim, ctx.z_shape, ctx.z_dtype = plan, head_dim, z.shape, z.dtype
        kept = z if norm_weight is not None else x
        ctx.save_for_backward(kept, norm_weight, rstd, xa, packed.a, packed.b, cos, sin)
        ctx.set_materialize_grads(False)
        heads = [p.out_features // head_dim for p in plan.projections]
        parts = [y[:, c].view(batch, seq_len, n, head_dim).transpose(1, 2) for c, n in zip(columns, heads, strict=True)]
        return *parts, z

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, d_pass: Tensor | None
    ) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        x, norm_weight, rstd, xa, a, b, cos, sin = ctx.saved_tensors
        wants_z, wants_norm, _, _, *wants = ctx.needs_input_grad[2:]
        if dq is None and dk is None and dv is None:  # only the returned residual was used
            return None, None, d_pass, *(None for _ in ctx.needs_input_grad[3:])
        batch, seq_len = ctx.z_shape[:2]
        grads_in = _filled(plan, (dq, dk, dv), batch, seq_len, ctx.head_dim)
        device_tensor = grads_in[0]
        with without_autocast(device_tensor):
            dxa = None
            if cos is not None and sin is not None:
                dy, dxa = qkv_rope_backward(*grads_in, b, _rotary(plan, cos, sin, ctx.head_dim), plan.dtype)
            else:
                flat = [g.transpose(1, 2).flatten(2).flatten(0, 1) for g in grads_in]
                dy = torch.cat(flat, dim=1).to(plan.dtype)
            grads = group_backward(
                plan,
                Packed(a, b),
                x=x.reshape(-1, x.shape[-1]),
                norm_weight=norm_weight,
                rstd=rstd,
                xa=xa,
                dy=dy,
                dxa=dxa,
                d_pass=None if d_pass is None else d_pass.reshape(-1, d_pass.shape[-1]),
                wants=[wants_z, wants_norm, *wants],
            )
        d_z, d_norm = grads.of_inputs(ctx.z_dtype, ctx.z_shape, norm_weight, wants_z=wants_z)
        return None, None, d_z, d_norm, None, None, *grads.both


def _rotary(plan: Plan, cos: Tensor, sin: Tensor, head_dim: int) -> Rotary:
    q, k, _ = plan.projections
    return Rotary(cos, sin, q.out_features // head_dim, k.out_features // head_dim)


def _filled(
    plan: Plan, grads: tuple[Tensor | None, ...], batch: int, seq_len: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients, zeros for outputs that were not used."""
    some = next(g for g in grads if g is not None)
    filled = [
        some.new_zeros((batch, p.out_features // head_dim, seq_len, head_dim)) if g is None else g
        for g, p in zip(grads, plan.projections, strict=True)
    ]
    return filled[0], filled[1], filled[2]
