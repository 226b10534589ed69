"""RMS norm by head times a gated unit of another projection, as gated delta nets have it before their output.

Legend: rows of D features (tokens and heads together).

    n = x / sqrt(mean(x^2) + eps)        y = w n silu(z)

    dn = dy w silu(z)          dx = rstd (dn - n mean(dn n))
    dz = dy w n silu'(z)       dw = sum over rows of dy n silu(z)

The arithmetic is float32 with one rounding (transformers rounds n, and w n). dw is partial sums added in a fixed order.
Kept for backward: x and z.
"""

from __future__ import annotations

from typing import Any

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
from ftkernels.primitives import activate, as_rows, column_sums, row_starts

#: Elements of a tile, programs that share the rows where dw is wanted, and the widest row.
_ELEMENTS, _PROGRAMS, _WIDEST = 4096, 528, 4096


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
            launch(x, z, None, weight, eps, out, out, want_dw=False)
        return rounded(out, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        dx, dz = (torch.empty(t.shape, dtype=store_dtype(t.dtype), device=t.device) for t in (x, z))
        dw = None
        if dx.numel():
            dw = launch(x, z, dy, weight, ctx.eps, dx, dz, want_dw=ctx.needs_input_grad[2])
        elif ctx.needs_input_grad[2]:
            dw = torch.zeros_like(weight)
        return rounded(dx, x.dtype), rounded(dz, z.dtype), None if dw is None else dw.to(weight.dtype), None


def launch(
    x: Tensor, z: Tensor, dy: Tensor | None, weight: Tensor, eps: float, out: Tensor, dz: Tensor, *, want_dw: bool
) -> Tensor | None:
    """One launch, backward where there is dy; gives dw float32 where it is wanted. ``out`` is contiguous, ``dz`` has
    any strides that rows can have.
    """
    width, rows_of_x, rows_of_z = x.shape[-1], as_rows(x), as_rows(z)
    block = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // block)
    tiles = triton.cdiv(rows_of_x.count, rows)
    blocks = triton.cdiv(tiles, 1 if interpreting() else _PROGRAMS) if want_dw else 1
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
