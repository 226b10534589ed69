"""The q, k and v projections of one attention layer with LoRA adapters, or trained themselves, the norm in front and
the rotary embedding behind.

Legend: B batch, S sequence, I input features, Hq and Hk heads, D head size. Derivation: kernels/README.md.

    x = norm(z)  or  z
    q, k, v = x @ W.T + bias + s * (x @ A.T) @ B.T      each with its own W, bias, s, A, B
    q, k = norm_q(q), norm_k(k)                         head by head or over all heads, where their norms are given
    q, k = rope(q), rope(k)                             where a rotary embedding is given; or in front of the norms

Or one layer gives q, k and v in turn (Phi-3), with one A and B between them, and xa is (B*S, K).

Saved: z, rstd, xa (B*S, 3K), the packed adapters, cos and sin. q, k and v are views of one buffer, which this backward
does not need; attention saves them for its own. With norms by head v is a view of the buffer before them, which is
saved, and q and k of another one.

A q projection may give the gate of attention's output as well (Qwen3-Next, Qwen3.5): the rows of W_q are then, head by
head, those of the query and those of its gate, D each. The gate is neither normalised nor rotated;
``ftkernels.output_gate`` uses it behind attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.gemm import lowrank_add
from ftkernels.limits import NormSpan, RopeLayout
from ftkernels.lora_group import lora_group, lora_group_reference
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
from ftkernels.qkv_norm_rope import qkv_norm_rope_backward, qkv_norm_rope_forward, qkv_rope_backward, qkv_rope_forward
from ftkernels.qkv_parts import HeadNorms, Rotary
from ftkernels.rms_norm import rms_norm, rms_norm_reference
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
    k: Projection | None = None,
    v: Projection | None = None,
    *,
    head_dim: int,
    kv_heads: int | None = None,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    norm_span: NormSpan = "head",
    norm_after_rope: bool = False,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
    backend: BackendName = "auto",
) -> QKV:
    """Queries, keys and values of the module docstring, in the layout that attention takes.

    Args:
        z: (B, S, I), the residual stream when ``norm`` is given.
        q: (Hq * D, I) layer; k, v: (Hk * D, I) layers. One GEMM when their weights were joined (``join_weights``).
            Without k and v, q is the joined layer ((Hq + 2 Hk) * D, I), whose rows are those of q, then k, then v.
        head_dim: D.
        kv_heads: Hk, of a joined layer.
        norm: applied to z first.
        head_norms: of q and of k: applied before the rotation.
        norm_span: "head": each head is normalised, weights (D,). "width": all heads together, weights (Hq * D,) and
            (Hk * D,) (OLMo-2, OLMo-3).
        norm_after_rope: the norms are applied after the rotation (HunYuan).
        rope: (cos, sin), each (B or 1, S, R) with R <= D: the first R features of a head are rotated. None leaves q and
            k unrotated.
        rope_layout: the features that are rotated together; see ``ftkernels.rope``.

    Returns:
        ``QKV``; q, k and v are strided views with a contiguous last dimension. Using ``residual`` for the residual
        connection instead of z itself lets backward add both gradients of z in one kernel.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    if z.dim() != 3:
        raise ValueError(f"expected z (B, S, I), got {tuple(z.shape)}")
    projections = [p for p in (q, k, v) if p is not None]
    for name, p in zip("qkv", projections, strict=False):
        check_projection(p, z.shape[-1], name)
    heads = _heads(projections, head_dim, kv_heads)
    plan = make_plan(z, projections, norm, backend)
    if rope is not None:
        cos, sin = rope
        wanted = ((1, z.shape[0]), z.shape[1])
        if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in wanted[0] or cos.shape[1] != wanted[1]:
            raise ValueError(f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit z {tuple(z.shape)}")
    epilogue = Epilogue(head_norms, norm_span, norm_after_rope, rope, rope_layout)
    check_epilogue(epilogue, head_dim, heads[0] * head_dim, heads[1] * head_dim)
    if not _in_one_kernel(plan, head_dim, epilogue):
        bare = lora_qkv(z, q, k, v, head_dim=head_dim, kv_heads=kv_heads, norm=norm, backend=backend)
        return apply_apart(bare, plan.dtype, epilogue, backend)
    angles = (None, None) if rope is None else rope
    norm_q, norm_k = (None, None) if head_norms is None else head_norms
    norms = None
    if norm_q is not None:
        after = norm_after_rope and rope is not None
        norms = HeadNorms(None, None, norm_q.eps, norm_q.form, norm_span, after)
    spec = _Spec(plan, heads, head_dim, norms, rope_layout == "pairs")
    weights = [None if each is None else each.weight for each in (norm, norm_q, norm_k)]
    trained = (*adapter_tensors(projections), *weight_tensors(projections))
    return QKV(*_LoraQkv.apply(spec, z, *weights, *angles, *trained))


def _heads(projections: Sequence[Projection], head_dim: int, kv_heads: int | None) -> tuple[int, int, int]:
    """The heads of q, of k and of v that three projections make, or a joined one."""
    rows = [p.out_features for p in projections]
    if len(rows) == 1 and kv_heads is not None:
        rows = [rows[0] - 2 * kv_heads * head_dim, *[kv_heads * head_dim] * 2]
    if len(rows) != 3 or min(rows) < head_dim or any(each % head_dim for each in rows) or rows[1] != rows[2]:
        made = ", ".join(str(p.out_features) for p in projections)
        raise ValueError(f"{made} features do not make heads of {head_dim} with kv_heads {kv_heads}")
    if kv_heads not in (None, rows[1] // head_dim):
        raise ValueError(f"k has {rows[1] // head_dim} heads of {head_dim}, not kv_heads {kv_heads}")
    return rows[0] // head_dim, rows[1] // head_dim, rows[2] // head_dim


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to queries and keys behind their projections: the arguments of ``lora_qkv`` of the same names."""

    head_norms: tuple[Norm, Norm] | None
    norm_span: NormSpan
    norm_after_rope: bool
    rope: tuple[Tensor, Tensor] | None
    rope_layout: RopeLayout


def check_epilogue(epilogue: Epilogue, head_dim: int, q_width: int, k_width: int) -> None:
    """Refuse unknown options, and norms whose weights do not fit."""
    span, layout = epilogue.norm_span, epilogue.rope_layout
    if span not in get_args(NormSpan) or layout not in get_args(RopeLayout):
        raise ValueError(f"unknown norm span {span!r} or rope layout {layout!r}")
    if epilogue.head_norms is None:
        return
    found = [None if each.weight is None else tuple(each.weight.shape) for each in epilogue.head_norms]
    wanted = [(head_dim,)] * 2 if span == "head" else [(q_width,), (k_width,)]
    if any(shape not in (None, fits) for shape, fits in zip(found, wanted, strict=True)):
        shapes = ", ".join(str(shape) for shape in found)
        of = f"heads of {head_dim}" if span == "head" else f"{q_width} and {k_width} features"
        raise ValueError(f"norms of {of} with weights of {shapes}")


def _in_one_kernel(plan: GroupPlan, head_dim: int, epilogue: Epilogue) -> bool:
    """True when the epilogue is one kernel, or none. Ranks too large for it, norms that differ in more than their
    weights, and those over the width behind a rotation, are operations of their own.
    """
    if epilogue.head_norms is None and epilogue.rope is None:
        return True
    if epilogue.head_norms is not None:
        of_q, of_k = ((each.eps, each.form, each.weight is None) for each in epilogue.head_norms)
        late = epilogue.norm_after_rope and epilogue.rope is not None
        if of_q != of_k or (late and epilogue.norm_span == "width"):
            return False
    if epilogue.rope is not None:
        cos, sin = epilogue.rope
        if cos.shape[-1] % 2 or cos.shape[-1] > head_dim or not cos.stride(-1) == sin.stride(-1) == 1:
            return False
    return plan.fused and head_dim % 2 == 0


def apply_apart(bare: QKV, dtype: torch.dtype, epilogue: Epilogue, backend: BackendName) -> QKV:
    """Queries and keys normalised and rotated by operations of their own."""
    q, k, v, residual = bare
    rope, layout, late = epilogue.rope, epilogue.rope_layout, epilogue.norm_after_rope
    if rope is not None and late:
        q, k = apply_rope(q, k, *rope, layout=layout, backend=backend)
    if epilogue.head_norms is not None:
        pairs = zip((q, k), epilogue.head_norms, strict=True)
        q, k = (_normed(x, norm, epilogue.norm_span, backend).to(dtype) for x, norm in pairs)
    if rope is not None and not late:
        q, k = apply_rope(q, k, *rope, layout=layout, backend=backend)
    return QKV(q, k, v, residual)


def _normed(heads: Tensor, norm: Norm, span: NormSpan, backend: BackendName) -> Tensor:
    """(B, heads, S, D), by token in memory as the projection wrote it, and handed on like that: rows of it need no
    copy, and attention, which writes as it is given queries, leaves what the output projection reads as it is.
    """
    by_token = heads.transpose(1, 2)
    rows = by_token if span == "head" else by_token.flatten(2)
    normed = rms_norm(rows, norm.weight, norm.eps, form=norm.form, backend=backend)
    return (normed if span == "head" else normed.unflatten(-1, by_token.shape[2:])).transpose(1, 2)


def lora_qkv_reference(
    z: Tensor,
    q: Projection,
    k: Projection | None = None,
    v: Projection | None = None,
    *,
    head_dim: int,
    kv_heads: int | None = None,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    norm_span: NormSpan = "head",
    norm_after_rope: bool = False,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
) -> QKV:
    """The same in plain torch with torch's own autograd."""
    projections = [p for p in (q, k, v) if p is not None]
    counts = _heads(projections, head_dim, kv_heads)
    x = norm_reference(z, norm, *projections)
    y = torch.cat([project_reference(x, p) for p in projections], dim=-1).unflatten(-1, (-1, head_dim))
    heads = list(y.transpose(1, 2).split(counts, dim=1))
    if rope is not None and norm_after_rope:
        heads[:2] = apply_rope_reference(heads[0], heads[1], *rope, layout=rope_layout)
    for index, each in enumerate(head_norms or ()):
        rows = heads[index] if norm_span == "head" else heads[index].transpose(1, 2).flatten(2)
        normed = rms_norm_reference(rows, each.weight, each.eps, form=each.form).to(x.dtype)
        heads[index] = normed if norm_span == "head" else normed.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    if rope is not None and not norm_after_rope:
        heads[:2] = apply_rope_reference(heads[0], heads[1], *rope, layout=rope_layout)
    return QKV(heads[0], heads[1], heads[2], z)


@dataclass(frozen=True, slots=True)
class _Spec:
    """One call: the plan of the projections, the heads of q, k and v and their size, the norms without their weights,
    and the layout.
    """

    plan: GroupPlan
    heads: tuple[int, int, int]
    head_dim: int
    norms: HeadNorms | None
    pairs: bool

    def rotary(self, cos: Tensor | None, sin: Tensor | None) -> Rotary:
        """cos and sin with the heads that they turn."""
        pairs, joined = self.pairs and cos is not None, len(self.plan.projections) == 1
        return Rotary(cos, sin, self.heads[0], self.heads[1], self.head_dim, pairs, joined)

    def heads_of(self, source: Tensor, part: int, shape: torch.Size) -> Tensor:
        """(B, heads, S, D): q, k or v in its own columns of ``source``. ``shape``: (B, S, I)."""
        first, count = sum(self.heads[:part]) * self.head_dim, self.heads[part]
        columns = source[:, first : first + count * self.head_dim]
        return columns.view(*shape[:2], count, self.head_dim).transpose(1, 2)


class _LoraQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        spec: _Spec,
        z: Tensor,
        norm_weight: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        *_: Tensor | None,
    ) -> tuple[Tensor, ...]:
        plan = spec.plan
        before: Tensor | None = None  # the heads' norms
        with without_autocast(z):
            x, rstd, rows = enter_base(plan, z.reshape(-1, z.shape[-1]), norm_weight)
            y, packed, xa = products(plan, x, rows)
            turned = y
            if spec.norms is not None:
                norms = replace(spec.norms, q=q_weight, k=k_weight)
                turned, before = qkv_norm_rope_forward(y, xa, packed.b, spec.rotary(cos, sin), norms)
            elif cos is not None and sin is not None:
                turned = qkv_rope_forward(y, xa, packed.b, spec.rotary(cos, sin))
            elif xa is not None and packed.b is not None:
                for index, c in enumerate(plan.columns()):
                    lowrank_add(y[:, c], xa[:, plan.ranks(index)], packed.b[c], None, triton_kernel=plan.fused)
        ctx.spec, ctx.z_shape, ctx.z_dtype = spec, z.shape, z.dtype
        kept = z if plan.norm_form is not None else x
        ctx.save_for_backward(
            *(kept, norm_weight, rstd, xa, packed.a, packed.b), *(cos, sin, q_weight, k_weight, before)
        )
        ctx.set_materialize_grads(False)
        sources = (turned, turned, turned if before is None else before)
        return *(spec.heads_of(source, part, z.shape) for part, source in enumerate(sources)), z

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, d_pass: Tensor | None
    ) -> tuple[Any, ...]:
        spec: _Spec = ctx.spec
        plan = spec.plan
        x, norm_weight, rstd, xa, a, b, cos, sin, q_weight, k_weight, before = ctx.saved_tensors
        wants_z, wants_norm, *wants_heads = ctx.needs_input_grad[1:5]
        if dq is None and dk is None and dv is None:  # only the returned residual was used
            return None, d_pass, *(None for _ in ctx.needs_input_grad[2:])
        batch, seq_len = ctx.z_shape[:2]
        grads_in = _filled(spec, (dq, dk, dv), batch, seq_len)
        device_tensor = grads_in[0]
        dxa: Tensor | None = None
        d_heads: list[Tensor | None] = [None, None]
        with without_autocast(device_tensor):
            if spec.norms is not None:
                norms, wanted = replace(spec.norms, q=q_weight, k=k_weight), any(wants_heads)
                made = qkv_norm_rope_backward(
                    grads_in, before, b, spec.rotary(cos, sin), norms, plan.dtype, want_dw=wanted
                )
                dy, dxa = made.d, made.dxa
                found = zip((made.dw_q, made.dw_k), (q_weight, k_weight), wants_heads, strict=True)
                d_heads = [None if dw is None or not w else dw.to(weight.dtype) for dw, weight, w in found]
            elif cos is not None and sin is not None:
                dy, dxa = qkv_rope_backward(*grads_in, b, spec.rotary(cos, sin), plan.dtype)
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
                wants=[wants_z, wants_norm, *ctx.needs_input_grad[7:]],
            )
        d_z, d_norm = grads.of_inputs(ctx.z_dtype, ctx.z_shape, norm_weight, wants_z=wants_z)
        return None, d_z, d_norm, *d_heads, None, None, *grads.both


def _filled(spec: _Spec, grads: tuple[Tensor | None, ...], batch: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three gradients, zeros for outputs that were not used."""
    some = next(g for g in grads if g is not None)
    filled = [
        some.new_zeros((batch, heads, seq_len, spec.head_dim)) if g is None else g
        for g, heads in zip(grads, spec.heads, strict=True)
    ]
    return filled[0], filled[1], filled[2]


class GatedQKV(NamedTuple):
    """q (B, Hq, S, D), k and v (B, Hk, S, D), the gate (B, S, Hq, D), and z again for the residual connection."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    residual: Tensor


def lora_gated_qkv(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
    backend: BackendName = "auto",
) -> GatedQKV:
    """Queries, keys, values and gates. ``q`` is a (2 * Hq * D, I) layer; the other arguments are of ``lora_qkv``.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, or one that is trained beneath an adapter.
    """
    heads = _gated_heads(q, k, v, head_dim)
    epilogue = Epilogue(head_norms, "head", norm_after_rope=False, rope=rope, rope_layout=rope_layout)
    check_epilogue(epilogue, head_dim, heads[0] * head_dim, heads[1] * head_dim)
    y, residual = lora_group(z, (q, k, v), norm=norm, backend=backend)
    query, gate, key, value = _parts(y, heads, head_dim)
    bare = QKV(*(x.transpose(1, 2) for x in (query, key, value)), residual)
    made = apply_apart(bare, y.dtype, epilogue, backend)
    return GatedQKV(made.q, made.k, made.v, gate, made.residual)


def lora_gated_qkv_reference(
    z: Tensor,
    q: Projection,
    k: Projection,
    v: Projection,
    *,
    head_dim: int,
    norm: Norm | None = None,
    head_norms: tuple[Norm, Norm] | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_layout: RopeLayout = "halves",
) -> GatedQKV:
    """The same in plain torch with torch's own autograd."""
    y, residual = lora_group_reference(z, (q, k, v), norm=norm)
    query, gate, key, value = _parts(y, _gated_heads(q, k, v, head_dim), head_dim)
    bare = QKV(*(x.transpose(1, 2) for x in (query, key, value)), residual)
    epilogue = Epilogue(head_norms, "head", norm_after_rope=False, rope=rope, rope_layout=rope_layout)
    made = apply_apart(bare, y.dtype, epilogue, "torch")
    return GatedQKV(made.q, made.k, made.v, gate, made.residual)


def _gated_heads(q: Projection, k: Projection, v: Projection, head_dim: int) -> tuple[int, int]:
    """Query heads and key heads."""
    rows = q.out_features, k.out_features, v.out_features
    if rows[0] % (2 * head_dim) or rows[1] % head_dim or rows[1] != rows[2]:
        raise ValueError(f"{rows} features do not make heads of {head_dim}, of queries with their gates")
    return rows[0] // (2 * head_dim), rows[1] // head_dim


def _parts(y: Tensor, heads: tuple[int, int], head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, gates, keys and values by head, (B, S, heads, D): views. torch joins their gradients at once."""
    both, key, value = y.split([2 * heads[0] * head_dim, *[heads[1] * head_dim] * 2], dim=-1)
    query, gate = both.unflatten(-1, (heads[0], 2 * head_dim)).split(head_dim, dim=-1)
    return query, gate, key.unflatten(-1, (heads[1], head_dim)), value.unflatten(-1, (heads[1], head_dim))
