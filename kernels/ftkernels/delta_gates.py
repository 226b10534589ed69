"""Decay and write strength of gated delta nets, from two projections of the token; and the norm behind their rule.

Legend: B batch, S tokens, H value heads.

    g = -exp(A_log) softplus(a + dt_bias)          beta = sigmoid(b)

    da = -dg exp(A_log) sigmoid(a + dt_bias)       db = d_beta beta (1 - beta)
    dA_log = sum over tokens of dg g               d_dt_bias = sum over tokens of da

Both outputs are float32, whatever the inputs' dtype: g is summed over tokens and exponentiated. transformers rounds
beta to the model's dtype. The sums are partial sums added in a fixed order. Kept for backward: the inputs.

The RMS norm by head times a gated unit of another projection, of rows of D features (tokens and heads together):

    n = x / sqrt(mean(x^2) + eps)        y = w n silu(z)

    dn = dy w silu(z)          dx = rstd (dn - n mean(dn n))
    dz = dy w n silu'(z)       dw = sum over rows of dy n silu(z)

The arithmetic is float32 with one rounding (transformers rounds n, and w n). dw is partial sums added in a fixed order.
Kept for backward: x and z.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendName,
    accumulate_dtype,
    choose_backend,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
)
from ftkernels.primitives import activate, as_rows, column_sums, row_starts, sigmoid

#: Elements of a tile, and programs that share the tokens.
_ELEMENTS, _PROGRAMS = 2048, 264


class Gates(NamedTuple):
    """The decay's logarithm and the write strength, (B, S, H) each, float32 (float64 for float64)."""

    g: Tensor
    beta: Tensor


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: BackendName = "auto") -> Gates:
    """The gates of tokens; the module docstring has the formulas.

    Args:
        a, b: (B, S, H), any strides.
        a_log, dt_bias: (H,).

    Raises:
        ValueError: shapes that do not fit.
    """
    if a.shape != b.shape or a.dim() < 1 or a_log.shape != a.shape[-1:] or dt_bias.shape != a.shape[-1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (a, b, a_log, dt_bias))
        raise ValueError(f"expected a and b (..., H), A_log and dt_bias (H,), got {shapes}")
    if not choose_backend(a.device, backend).is_triton or a.dtype == torch.float64:
        return delta_gates_reference(a, b, a_log, dt_bias)
    return Gates(*_Gates.apply(a, b, a_log, dt_bias))  # type: ignore[no-untyped-call]


def delta_gates_reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """The same in plain torch, differentiable."""
    acc = accumulate_dtype(a.dtype)
    x = a.to(acc) + dt_bias.to(acc)
    # logaddexp has no threshold beyond which it is x itself, as torch's softplus has.
    return Gates(-a_log.to(acc).exp() * torch.logaddexp(x, torch.zeros_like(x)), torch.sigmoid(b.to(acc)))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to relative rounding for very negative x as well."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 + e * (-0.5 + e * (0.3333333333333333 + e * (-0.25 + e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < 0.03, small, tl.log(1.0 + e))


@triton.jit
def _gates_kernel(
    a_ptr,
    a_inner,
    a_outer_stride,
    a_inner_stride,
    b_ptr,
    b_inner,
    b_outer_stride,
    b_inner_stride,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    da_ptr,
    da_inner,
    da_outer_stride,
    da_inner_stride,
    db_ptr,
    db_inner,
    db_outer_stride,
    db_inner_stride,
    sums_ptr,
    M,
    H,
    blocks,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes g and beta, or reads their gradients from there and writes da, db and sums of each program."""
    cols = tl.arange(0, BLOCK)
    rate = -tl.exp(tl.load(a_log_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    shift = tl.load(dt_bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    d_log, d_shift = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(blocks):
        rows = (tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        a = tl.load(
            a_ptr + row_starts(rows, a_inner, a_outer_stride, a_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        b = tl.load(
            b_ptr + row_starts(rows, b_inner, b_outer_stride, b_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        x, b = a.to(tl.float32) + shift, b.to(tl.float32)
        at = rows.to(tl.int64)[:, None] * H + cols[None, :]
        if BACKWARD:
            dg = tl.load(g_ptr + at, mask=mask, other=0.0)
            da = dg * rate * sigmoid(x)
            db = tl.load(beta_ptr + at, mask=mask, other=0.0) * sigmoid(b) * sigmoid(-b)
            d_log += dg * rate * _softplus(x)
            d_shift += da
            da_at = da_ptr + row_starts(rows, da_inner, da_outer_stride, da_inner_stride)[:, None] + cols[None, :]
            db_at = db_ptr + row_starts(rows, db_inner, db_outer_stride, db_inner_stride)[:, None] + cols[None, :]
            tl.store(da_at, da.to(da_ptr.dtype.element_ty), mask=mask)
            tl.store(db_at, db.to(db_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(g_ptr + at, rate * _softplus(x), mask=mask)
            tl.store(beta_ptr + at, sigmoid(b), mask=mask)
    if BACKWARD:
        sums_at = sums_ptr + tl.program_id(0) * (2 * H) + cols
        tl.store(sums_at, tl.sum(d_log, 0), mask=cols < H)
        tl.store(sums_at + H, tl.sum(d_shift, 0), mask=cols < H)


def launch_gates(tensors: tuple[Tensor, Tensor, Tensor, Tensor], outs: Gates, grads: Gates | None) -> Tensor:
    """One launch; gives the sums (2, H) of backward, where ``outs`` are the gates' gradients, contiguous, and ``grads``
    da and db, of any strides that rows can have.
    """
    a, b, a_log, dt_bias = tensors
    heads, left, right = a.shape[-1], as_rows(a), as_rows(b)
    into = [as_rows(t) for t in (outs if grads is None else grads)]
    block = triton.next_power_of_2(heads)
    rows = max(1, _ELEMENTS // block)
    tiles = triton.cdiv(left.count, rows)
    blocks = 1 if grads is None else triton.cdiv(tiles, 1 if interpreting() else _PROGRAMS)
    programs = triton.cdiv(tiles, blocks)
    sums = torch.empty((programs, 2 * heads) if grads is not None else (0,), device=a.device)
    with on_device_of(a):
        _gates_kernel[(programs,)](
            *left.addresses,
            *right.addresses,
            a_log.contiguous(),
            dt_bias.contiguous(),
            *outs,
            *into[0].addresses,
            *into[1].addresses,
            sums,
            left.count,
            heads,
            blocks,
            BACKWARD=grads is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return sums if grads is None else column_sums(sums).view(2, heads)


class _Gates(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, a_log, dt_bias)
        outs = Gates(*(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2)))
        if a.numel():
            launch_gates((a, b, a_log, dt_bias), outs, None)
        return outs.g, outs.beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor, d_beta: Tensor) -> tuple[Tensor, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        grads = Gates(*(torch.empty(t.shape, dtype=store_dtype(t.dtype), device=t.device) for t in (a, b)))
        sums = torch.zeros((2, a.shape[-1]), device=a.device)
        if a.numel():
            sums = launch_gates((a, b, a_log, dt_bias), Gates(dg.contiguous(), d_beta.contiguous()), grads)
        return (
            rounded(grads.g, a.dtype),
            rounded(grads.beta, b.dtype),
            sums[0].to(a_log.dtype),
            sums[1].to(dt_bias.dtype),
        )


#: Elements of a tile, programs that share the rows where dw is wanted, and the widest row.
_NORM_ELEMENTS, _NORM_PROGRAMS, _WIDEST = 4096, 528, 4096


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, *, backend: BackendName = "auto") -> Tensor:
    """``weight * norm(x) * silu(z)``, contiguous, in x's dtype; the module docstring has the formula.

    Args:
        x, z: (..., D), any strides.
        weight: (D,).

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() < 1 or z.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(f"x {tuple(x.shape)}, z {tuple(z.shape)} and weight {tuple(weight.shape)} do not fit")
    if not choose_backend(x.device, backend).is_triton or x.shape[-1] > _WIDEST or x.dtype == torch.float64:
        return gated_norm_reference(x, z, weight, eps)
    out: Tensor = _GatedNorm.apply(x, z, weight, eps)  # type: ignore[no-untyped-call]
    return out


def gated_norm_reference(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in plain torch, differentiable; float32 inside (float64 for float64), one rounding."""
    acc = accumulate_dtype(x.dtype)
    wide, gate = x.to(acc), z.to(acc)
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.to(acc) * n * gate * torch.sigmoid(gate)).to(x.dtype).contiguous()


@triton.jit
def _norm_kernel(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    z_ptr,
    z_inner,
    z_outer_stride,
    z_inner_stride,
    dy_ptr,
    dy_inner,
    dy_outer_stride,
    dy_inner_stride,
    w_ptr,
    out_ptr,
    dz_ptr,
    dz_inner,
    dz_outer_stride,
    dz_inner_stride,
    dw_ptr,
    M,
    blocks,
    eps,
    BACKWARD: tl.constexpr,
    WANT_DW: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``out_ptr`` takes y, or dx in backward."""
    cols = tl.arange(0, BLOCK)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)[None, :]
    dw = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(blocks):
        rows = (tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < D)[None, :]
        x = tl.load(
            x_ptr + row_starts(rows, x_inner, x_outer_stride, x_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        z = tl.load(
            z_ptr + row_starts(rows, z_inner, z_outer_stride, z_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        x = x.to(tl.float32)
        rstd = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        n = x * rstd
        unit, slope = activate(z.to(tl.float32), "silu")
        at = rows.to(tl.int64)[:, None] * D + cols[None, :]
        if BACKWARD:
            dy = tl.load(
                dy_ptr + row_starts(rows, dy_inner, dy_outer_stride, dy_inner_stride)[:, None] + cols[None, :],
                mask=mask,
                other=0.0,
            )
            dy = dy.to(tl.float32)
            dn = dy * w * unit
            dx = rstd * (dn - n * (tl.sum(dn * n, 1) / D)[:, None])
            tl.store(out_ptr + at, dx.to(out_ptr.dtype.element_ty), mask=mask)
            dz_at = dz_ptr + row_starts(rows, dz_inner, dz_outer_stride, dz_inner_stride)[:, None] + cols[None, :]
            tl.store(dz_at, (dy * w * n * slope).to(dz_ptr.dtype.element_ty), mask=mask)
            if WANT_DW:
                dw += dy * n * unit
        else:
            tl.store(out_ptr + at, (w * n * unit).to(out_ptr.dtype.element_ty), mask=mask)
    if WANT_DW:
        tl.store(dw_ptr + tl.program_id(0) * D + cols, tl.sum(dw, 0), mask=cols < D)


class _GatedNorm(torch.autograd.Function):
    """Saves x, z and the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=store_dtype(x.dtype), device=x.device)
        if out.numel():
            launch_norm(x, z, None, weight, eps, out, out, want_dw=False)
        return rounded(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        dx, dz = (torch.empty(t.shape, dtype=store_dtype(t.dtype), device=t.device) for t in (x, z))
        dw = None
        if dx.numel():
            dw = launch_norm(x, z, dy, weight, ctx.eps, dx, dz, want_dw=ctx.needs_input_grad[2])
        elif ctx.needs_input_grad[2]:
            dw = torch.zeros_like(weight)
        return rounded(dx, x.dtype), rounded(dz, z.dtype), None if dw is None else dw.to(weight.dtype), None


def launch_norm(
    x: Tensor, z: Tensor, dy: Tensor | None, weight: Tensor, eps: float, out: Tensor, dz: Tensor, *, want_dw: bool
) -> Tensor | None:
    """One launch, backward where there is dy; gives dw float32 where it is wanted. ``out`` is contiguous, ``dz`` has
    any strides that rows can have.
    """
    width, rows_of_x, rows_of_z = x.shape[-1], as_rows(x), as_rows(z)
    block = triton.next_power_of_2(width)
    rows = max(1, _NORM_ELEMENTS // block)
    tiles = triton.cdiv(rows_of_x.count, rows)
    blocks = triton.cdiv(tiles, 1 if interpreting() else _NORM_PROGRAMS) if want_dw else 1
    programs = triton.cdiv(tiles, blocks)
    partial = torch.empty((programs, width) if want_dw else (0,), device=x.device)
    with on_device_of(x):
        _norm_kernel[(programs,)](
            *rows_of_x.addresses,
            *rows_of_z.addresses,
            *(rows_of_x if dy is None else as_rows(dy)).addresses,
            weight.contiguous(),
            out,
            *as_rows(dz).addresses,
            partial,
            rows_of_x.count,
            blocks,
            eps,
            BACKWARD=dy is not None,
            WANT_DW=want_dw,
            D=width,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return column_sums(partial) if want_dw else None
