"""A gated MLP of three linear layers with LoRA adapters, or trained themselves, and optionally the norm in front and
the residual behind.

Legend: M rows, H hidden size, F intermediate size, K padded rank. Derivation: kernels/README.md.

    x = norm(z)  or  z
    g = x @ Wg.T + s_g * (x @ Ag.T) @ Bg.T
    u = x @ Wu.T + s_u * (x @ Au.T) @ Bu.T
    h = act(g) * u
    y = h @ Wd.T + s_d * (h @ Ad.T) @ Bd.T   (m * y + z, with the residual)

Or one layer gives g beside u (Phi-3, GLM-4), with one A and B between them, and xa is (M, K).

Saved: z, rstd (M,), the base outputs of gate and up (M, 2F), xa (M, 2K), ha (M, K) and the packed adapters; with
``save="input"`` z and ha alone. Never saved: h, act(g), x and the adapters' outputs. Kernels of the backward compute
them again from what they read anyway; where weights are trained, x is formed again for their gradients.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, without_autocast
from ftkernels.early import EarlySave
from ftkernels.gemm import add_mm_, lowrank_add
from ftkernels.glu import ACTIVATIONS, GluLowRank, glu_backward, glu_backward_torch, glu_forward, glu_reference
from ftkernels.limits import Activation
from ftkernels.lowrank import (
    AdapterInputs,
    adapter_dx,
    adapter_grads,
    adapter_input_grad,
    base_backward,
    base_forward,
    enter_base,
    group_backward,
    products,
    project,
    weight_grads,
)
from ftkernels.lowrank_plan import GroupPlan, Packed, adapter_tensors, make_plan, pack_a, pack_b
from ftkernels.primitives import RowSums
from ftkernels.projection import (
    Norm,
    Projection,
    check_projection,
    norm_reference,
    project_reference,
    weight_tensors,
)
from ftkernels.side_stream import SideStream

ResidualMode = Literal["none", "add", "return"]
Save = Literal["gate_up", "gate_up_once", "input"]


def lora_mlp(
    z: Tensor,
    gate: Projection,
    up: Projection | None,
    down: Projection,
    *,
    activation: Activation = "silu",
    norm: Norm | None = None,
    residual: ResidualMode = "none",
    scale: float = 1.0,
    save: Save = "gate_up",
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The MLP of the module docstring.

    Args:
        z: (..., H), the residual stream when ``norm`` is given.
        gate, up: (F, H) layers. One GEMM when their weights were joined (``join_weights``). Without up, gate is the
            joined layer (2F, H), whose rows are those of gate, then up.
        down: (H', F) layer; H' = H when a residual is added.
        activation: see ``ftkernels.glu``.
        norm: applied to z first.
        residual: "none" gives ``mlp``; "add" gives ``z + scale * mlp``; "return" gives ``(mlp, z)``. Whoever then uses
            the second output instead of z itself lets backward add both gradients of z in one kernel.
        scale: m, of what is added to a residual.
        save: what is saved for backward. All three give the same bits.
            "gate_up": the base outputs of gate and up.
            "gate_up_once": the same, but the first backward writes the gradients over them, which saves 4 * M * F
            bytes in half precision. A second backward through a retained graph computes them again.
            "input": z alone, before anything is computed; backward computes norm, gate and up again.

    Raises:
        ValueError: shapes that do not fit, a packed base weight, one that is trained beneath an adapter, or an unknown
            option.
    """
    entering = [gate] if up is None else [gate, up]
    for name, p in zip(("gate", "up"), entering, strict=False):
        check_projection(p, z.shape[-1], name)
    check_projection(down, _width(gate, up), "down")
    if activation not in ACTIVATIONS or residual not in get_args(ResidualMode) or save not in get_args(Save):
        raise ValueError(f"unknown activation {activation!r}, residual mode {residual!r} or save mode {save!r}")
    if residual != "add" and scale != 1.0:
        raise ValueError(f"scale {scale} is of what is added to a residual, and none is added")
    if residual == "add" and down.out_features != z.shape[-1]:
        raise ValueError(f"down gives {down.out_features} features, the residual has {z.shape[-1]}")
    inner = make_plan(z, entering, norm, backend)
    # The second half computes in the first half's dtype, whatever the dtype of down's weight.
    outer = replace(make_plan(z, [down], None, backend), dtype=inner.dtype)
    early = EarlySave() if save == "input" else None
    spec = _Spec(inner, outer, activation, inner.fused and outer.fused and not outer.drops, save, early, _Handed())
    weight = None if norm is None else norm.weight
    if early is not None:
        z = early.save(z)
    down_weight, down_bias = weight_tensors([down])
    trained = (*adapter_tensors(entering), *weight_tensors(entering), down.a, down_weight)
    h, ha, passed = _Unit.apply(spec, z, weight, *trained)
    added = passed.reshape(-1, z.shape[-1]) if residual == "add" else None
    handed = spec.handed if down_weight is not None else None
    y = _Down.apply(outer, handed, scale, h, ha, added, down.b, down_bias).view(*z.shape[:-1], down.out_features)
    return (y, passed) if residual == "return" else y


def lora_mlp_reference(
    z: Tensor,
    gate: Projection,
    up: Projection | None,
    down: Projection,
    *,
    activation: Activation = "silu",
    norm: Norm | None = None,
    residual: ResidualMode = "none",
    scale: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """The same in plain torch with torch's own autograd."""
    entering = [gate] if up is None else [gate, up]
    x = norm_reference(z, norm, *entering)
    first, second = torch.cat([project_reference(x, p) for p in entering], dim=-1).chunk(2, dim=-1)
    y = project_reference(glu_reference(first, second, activation), down)
    if residual == "add":
        return z + scale * y
    return (y, z) if residual == "return" else y


def _width(gate: Projection, up: Projection | None) -> int:
    """F, of gate and up or of the joined layer."""
    if up is None and gate.out_features % 2:
        raise ValueError(f"{gate.out_features} output features are not those of a gate and an up")
    if up is not None and gate.out_features != up.out_features:
        raise ValueError(f"gate has {gate.out_features} output features, up {up.out_features}")
    return gate.out_features // 2 if up is None else gate.out_features


@dataclass(slots=True)
class _Handed:
    """dy (M, H') in the products' dtype, from the backward of down to that of the unit, which alone knows h."""

    dy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Spec:
    """One call: the plans of gate and up (``inner``) and of down (``outer``), whether the low-rank terms are fused,
    and what is saved; ``early`` holds z when that is the input. ``handed``: what a trained down's gradient needs.
    """

    inner: GroupPlan
    outer: GroupPlan
    activation: Activation
    fused: bool
    save: Save
    early: EarlySave | None
    handed: _Handed


@dataclass(frozen=True, slots=True)
class _Inner:
    """The input and output of gate and up.

    kept: (..., H), the norm's input, or x without a norm. gate_up: (M, 2F), the base outputs; with the adapters' share
    where the low-rank terms are not fused. x: (M, H), what they read, where it has just been formed.
    """

    kept: Tensor
    rstd: Tensor | None
    packed: Packed
    xa: Tensor | None
    gate_up: Tensor
    x: Tensor | None = None


def _form(spec: _Spec, z: Tensor, norm_weight: Tensor | None) -> _Inner:
    """Everything up to gate and up, the same bits each time."""
    inner = spec.inner
    x, rstd, rows = enter_base(inner, z.reshape(-1, z.shape[-1]), norm_weight)
    gate_up, packed, xa = products(inner, x, rows)
    if not spec.fused and xa is not None and packed.b is not None:
        for index, columns in enumerate(inner.columns()):
            lowrank_add(gate_up[:, columns], xa[:, inner.ranks(index)], packed.b[columns], None, triton_kernel=False)
    return _Inner(z if inner.norm_form is not None else x, rstd, packed, xa, gate_up, x)


def _low_rank(first: Packed, second: Packed, xa: Tensor | None) -> GluLowRank | None:
    """The low-rank terms that ride in the kernel; None when gate and up have none (down's then takes its own GEMM)."""
    if xa is None or first.b is None:
        return None
    return GluLowRank(xa, first.b, second.a)


def _unit_forward(spec: _Spec, formed: _Inner, second: Packed) -> tuple[Tensor, Tensor | None]:
    """(h, ha) from gate and up."""
    inner, outer = spec.inner, spec.outer
    width = formed.gate_up.shape[1] // 2
    gate, up = formed.gate_up[:, :width], formed.gate_up[:, width:]
    if spec.fused:
        low = _low_rank(formed.packed, second, formed.xa)
        h, ha = glu_forward(gate, up, spec.activation, low)
        if low is not None and low.a_down is not None:
            return h, ha
        return h, project(outer, second, h)
    h = glu_forward(gate, up, spec.activation)[0] if inner.triton else glu_reference(gate, up, spec.activation)
    return h, project(outer, second, h)


class _Unit(torch.autograd.Function):
    """(h, ha, z) from z: everything in front of down's products. h is not saved; down's A and weight get their gradient
    here.

    The MLP is cut in two so that activation checkpointing need not run down's product again: all that is saved through
    autograd is known once this half has run.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: _Spec, z: Tensor, norm_weight: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        with without_autocast(z):
            formed = _form(spec, z, norm_weight)
            second = Packed(pack_a(spec.outer, z.device), None)
            h, ha = _unit_forward(spec, formed, second)
        ctx.spec, ctx.z_shape, ctx.z_dtype = spec, z.shape, z.dtype
        if spec.early is not None:
            ctx.norm_weight = None if norm_weight is None else norm_weight.detach()
        else:
            a, b = formed.packed.a, formed.packed.b
            ctx.save_for_backward(formed.kept, norm_weight, formed.rstd, formed.gate_up, formed.xa, a, b, second.a)
        ctx.overwritten = False
        ctx.set_materialize_grads(False)
        return h, ha, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dha: Tensor | None, d_pass: Tensor | None) -> tuple[Any, ...]:
        spec: _Spec = ctx.spec
        _, wants_z, *wants, wants_a, wants_w = ctx.needs_input_grad
        if dh is None:  # only the returned residual was used
            return None, d_pass, *(None for _ in wants), None, None
        with without_autocast(dh):
            formed, norm_weight, second, ours = _recall(ctx)
            down = _unit_backward(spec, dh, dha, formed, second, overwrite=ours, want_a=wants_a, want_w=wants_w)
            grads = group_backward(
                spec.inner,
                formed.packed,
                x=formed.kept.reshape(-1, formed.kept.shape[-1]),
                norm_weight=norm_weight,
                rstd=formed.rstd,
                xa=formed.xa,
                dy=down.d_both,
                dxa=down.dxa,
                d_pass=None if d_pass is None else d_pass.reshape(-1, d_pass.shape[-1]),
                wants=[wants_z, *wants],
                entered=formed.x,
            )
        d_z, d_norm = grads.of_inputs(ctx.z_dtype, ctx.z_shape, norm_weight, wants_z=wants_z)
        return None, d_z, d_norm, *grads.both, down.d_a, down.d_weight


def _recall(ctx: Any) -> tuple[_Inner, Tensor | None, Packed, bool]:
    """The state that backward starts from: gate and up, the norm's weight, down's packed A, and True when backward may
    write over gate and up.
    """
    spec: _Spec = ctx.spec
    if spec.early is not None:
        z = spec.early.tensor()
        return _form(spec, z, ctx.norm_weight), ctx.norm_weight, Packed(pack_a(spec.outer, z.device), None), True
    kept, norm_weight, rstd, gate_up, xa, a, b, a_down = ctx.saved_tensors
    second = Packed(a_down, None)
    if ctx.overwritten:
        return _form(spec, kept, norm_weight), norm_weight, second, True
    ctx.overwritten = spec.save == "gate_up_once"
    return _Inner(kept, rstd, Packed(a, b), xa, gate_up), norm_weight, second, ctx.overwritten


@dataclass(frozen=True, slots=True)
class _UnitGrads:
    """dgate beside dup (M, 2F), dxa's partial sums (P, M, 2K or K) or None, and dA and dW of down or None."""

    d_both: Tensor
    dxa: Tensor | None
    d_a: Tensor | None
    d_weight: Tensor | None


def _unit_backward(
    spec: _Spec,
    dh: Tensor,
    dha: Tensor | None,
    formed: _Inner,
    second: Packed,
    *,
    overwrite: bool,
    want_a: bool,
    want_w: bool,
) -> _UnitGrads:
    """``dh`` is this operation's own: overwritten. So is ``formed.gate_up`` with ``overwrite``."""
    inner, outer = spec.inner, spec.outer
    width = formed.gate_up.shape[1] // 2
    gate, up = formed.gate_up[:, :width], formed.gate_up[:, width:]
    out = formed.gate_up if overwrite else None
    want_h = (want_a and dha is not None) or want_w
    low = _low_rank(formed.packed, second, formed.xa) if spec.fused else None
    dxa: Tensor | None = None
    h: Tensor | None
    if low is not None:
        d_both, h, dxa = glu_backward(dh, gate, up, spec.activation, lowrank=low, dya=dha, want_h=want_h, out=out)
    else:
        # Not fused: gate and up are complete, and dh takes its delta from a GEMM.
        if dha is not None and second.a is not None:
            dh = dh.add_(adapter_dx(outer, second.a, dha)) if outer.drops else add_mm_(dh, dha, second.a)
        if inner.triton:
            d_both, h, _ = glu_backward(dh, gate, up, spec.activation, want_h=want_h, out=out)
        else:
            d_both, h = glu_backward_torch(dh, gate, up, spec.activation)
    grads: list[Tensor | None] = [None, None]
    if want_a and h is not None and dha is not None:
        later = SideStream(dh.device, outer.deferred)
        with nullcontext() if later.waits else later.work():
            adapter_grads(outer, AdapterInputs(dxa=RowSums(dha, None), x=h), grads, [True, False])
        later.join(grads[0], reads=(dha, h))
    d_weight, dy = None, spec.handed.dy
    if want_w and h is not None and dy is not None:
        d_weight, spec.handed.dy = weight_grads(outer, dy, h, [True, False])[0], None
    return _UnitGrads(d_both, dxa, grads[0], d_weight)


class _Down(torch.autograd.Function):
    """y from h and ha. Keeps ha and B, both of the adapter's rank, and not h."""

    @staticmethod
    def forward(
        ctx: Any,
        outer: GroupPlan,
        handed: _Handed | None,
        scale: float,
        h: Tensor,
        ha: Tensor | None,
        residual: Tensor | None,
        *_: Tensor | None,
    ) -> Tensor:
        with without_autocast(h):
            side = SideStream(h.device)
            y = base_forward(outer, h)
            with side.work():
                b = pack_b(outer, h.device)
            side.join(b)
            y = lowrank_add(y, ha, b, residual, triton_kernel=outer.fused, scale=scale)
        ctx.outer, ctx.handed, ctx.scale = outer, handed, scale
        ctx.residual_dtype = None if residual is None else residual.dtype
        # Not through save_for_backward: a checkpoint that runs the MLP again may then stop before down's product.
        ctx.ha, ctx.b = None if ha is None else ha.detach(), b
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        outer: GroupPlan = ctx.outer
        _, _, _, _, _, wants_residual, wants_b, wants_bias = ctx.needs_input_grad
        grads: list[Tensor | None] = [None, None]
        dha = None
        with without_autocast(dy):
            low = (dy if ctx.scale == 1.0 else dy * ctx.scale).to(outer.dtype)
            side, later = SideStream(dy.device), SideStream(dy.device, outer.deferred)
            dh = base_backward(outer, low, None)
            if ctx.b is not None:
                with side.work():
                    dha = adapter_input_grad(outer, ctx.b, low).to(outer.dtype)
                with later.work():
                    adapter_grads(outer, AdapterInputs(dy=low, xa=ctx.ha), grads, [False, wants_b])
            side.join(dha)
            later.join(grads[1], reads=(low, ctx.ha))
            d_bias = weight_grads(outer, low, low, [False, wants_bias])[1]
        if ctx.handed is not None:
            ctx.handed.dy = low
        return None, None, None, dh, dha, dy.to(ctx.residual_dtype) if wants_residual else None, grads[1], d_bias
