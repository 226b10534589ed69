"""RMS normalisation, in the forms that model families use, with or without a residual connection.

Legend: M rows, H width. For one row x:

    rstd = 1 / sqrt(mean(x^2) + eps)         float32
    n = x * rstd
    llama:  y = round(n) * w                 n is rounded to x's dtype before the product; y in the dtype of x * w
    gemma:  y = round(n * (1 + w))           all float32, one rounding, y in x's dtype
    plain:  y = round(n * w)                 likewise (OLMo-2, OLMo-3, gpt-oss, Gemma-4, Nemotron-H)

Without a weight y = round(n) in every form. Backward, with g = dy * w (llama, plain), dy * (1 + w) (gemma) or dy:

    dx = rstd * (g - n * mean(g * n))
    dw = sum over rows of dy * n             float32 partial sums a program, added in a fixed order

With a residual:

    add_rms_norm:  r' = x + r,  y = norm(r')      pre-norm blocks; gives (y, r'). Backward adds dr' in its kernel
    rms_norm_add:  y = r + norm(x)                post-norm blocks (Gemma-2, Gemma-3)

dx never overwrites dy: in Gemma-2 both the norm and the residual read dy (Liger 370, 376).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendChoice,
    BackendName,
    Tile,
    accumulate_dtype,
    choose_backend,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
    triton_store_dtype,
)
from ftkernels.fp8 import quantized_rows
from ftkernels.limits import WIDEST_ROW, NormForm
from ftkernels.primitives import as_rows, column_sums, row_starts


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, form: NormForm = "llama", backend: BackendName = "auto"
) -> Tensor:
    """Normalise the last dimension of ``x``; the module docstring has the formulas.

    Args:
        x: (..., H), any strides.
        weight: (H,), or None: no weight.
        form: "llama", "gemma" or "plain"; they differ in the 1 that Gemma adds to the weight and in where they round.

    Raises:
        ValueError: shapes that do not fit, or an unknown form.
    """
    _check(x, weight, form, None)
    if not norm_backend(x, backend).is_triton:
        return rms_norm_reference(x, weight, eps, form=form)
    return _Norm.apply(x, None, weight, eps, form, "none")[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    form: NormForm = "llama",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``. Shapes and errors as ``rms_norm``; ``residual`` has ``x``'s shape."""
    _check(x, weight, form, residual)
    if not norm_backend(x, backend).is_triton:
        total = x + residual
        return rms_norm_reference(total, weight, eps, form=form), total
    y, total = _Norm.apply(x, residual, weight, eps, form, "before")
    return y, total


def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    form: NormForm = "gemma",
    backend: BackendName = "auto",
) -> Tensor:
    """``residual + norm(x)``. Shapes and errors as ``rms_norm``; ``residual`` has ``x``'s shape."""
    _check(x, weight, form, residual)
    if not norm_backend(x, backend).is_triton:
        return residual + rms_norm_reference(x, weight, eps, form=form)
    return _Norm.apply(x, residual, weight, eps, form, "after")[0]


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, *, form: NormForm = "llama") -> Tensor:
    """The same in plain torch, differentiable. float64 inputs are computed in float64."""
    wide = x.to(accumulate_dtype(x.dtype))
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return n.to(x.dtype)
    if form == "llama":
        return weight * n.to(x.dtype)
    return (n * (weight.to(n.dtype) + (1.0 if form == "gemma" else 0.0))).to(x.dtype)


def norm_backend(x: Tensor, backend: BackendName = "auto") -> BackendChoice:
    """Chooses the implementation of the norms for ``x``, and says why."""
    if x.shape[-1] > WIDEST_ROW:
        return BackendChoice("torch", f"rows of {x.shape[-1]} are wider than the kernel's {WIDEST_ROW}")
    return choose_backend(x.device, backend)


class _Norm(torch.autograd.Function):
    """(y, x + residual or None). Saves x (or the sum) and rstd; n is recomputed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, form: NormForm, where: Any
    ) -> tuple[Tensor, Tensor | None]:
        y, total, rstd = norm_forward(x, weight, eps, form, residual=residual, where=where)
        ctx.save_for_backward(x if total is None else total, weight, rstd)
        ctx.form, ctx.where, ctx.x_dtype = form, where, x.dtype
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_total: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        wants_x, wants_residual, wants_w = ctx.needs_input_grad[:3]
        if dy is None:  # only the sum was used
            dy = torch.zeros_like(x)
        dx, dw = norm_backward(
            dy, x, weight, rstd, ctx.form, d_sum=d_total if ctx.where == "before" else None, want_dw=wants_w
        )
        d_residual = None
        if wants_residual:
            d_residual = (dx if ctx.where == "before" else dy).to(ctx.residual_dtype)
        return (
            dx.to(ctx.x_dtype) if wants_x else None,
            d_residual,
            None if dw is None else dw.to(weight.dtype),
            None,
            None,
            None,
        )


def _check(x: Tensor, weight: Tensor | None, form: str, residual: Tensor | None) -> None:
    if form not in get_args(NormForm):
        raise ValueError(f"form must be 'llama', 'gemma' or 'plain', got {form!r}")
    if x.dim() < 1:
        raise ValueError("a norm needs rows, not a scalar")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {tuple(weight.shape)} does not fit the last dimension of x {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual {tuple(residual.shape)} does not have the shape of x {tuple(x.shape)}")


# Programs that share the rows when dw is wanted: each leaves one partial row of dw.
_DW_PROGRAMS = 528


def norm_dtype(x: torch.dtype, weight: Tensor | None, form: NormForm) -> torch.dtype:
    """The dtype of the norm's output."""
    return x if weight is None or form != "llama" else torch.promote_types(x, weight.dtype)


def kernel_form(weight: Tensor | None, form: NormForm) -> str:
    """The constexpr ``FORM`` of kernels: "bare" without a weight, which is not read then."""
    return "bare" if weight is None else form


@triton.jit
def _forward_kernel(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    res_ptr,
    w_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    q_ptr,
    q_scale_ptr,
    M,
    H,
    eps,
    FORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTIZE: tl.constexpr,
    ACC: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < H)
    x_at = row_starts(rows, x_inner, x_outer_stride, x_inner_stride)[:, None] + cols
    dense = rows.to(tl.int64)[:, None] * H + cols
    x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(ACC)
    if RESIDUAL == "before":
        # The sum is stored rounded, and it is the stored sum that is normalised.
        x = (x + tl.load(res_ptr + dense, mask=mask, other=0.0).to(ACC)).to(ROUND).to(ACC)
        tl.store(sum_ptr + dense, x.to(sum_ptr.dtype.element_ty), mask=mask)
    if FORM != "bare":
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(ACC)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / H + tl.cast(eps, ACC))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    n = x * rstd[:, None]
    if FORM == "gemma":
        y = n * (1.0 + w)
    elif FORM == "llama":
        y = n.to(ROUND).to(ACC) * w
    elif FORM == "plain":
        y = n * w
    else:
        y = n
    if RESIDUAL == "after":
        y += tl.load(res_ptr + dense, mask=mask, other=0.0).to(ACC)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + dense, y, mask=mask)
    if QUANTIZE:  # what is stored is quantized, as a pass of its own would
        q, q_scale = quantized_rows(y.to(tl.float32))
        tl.store(q_ptr + dense, q.to(q_ptr.dtype.element_ty), mask=mask)
        tl.store(q_scale_ptr + rows, q_scale, mask=rows < M)


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    w_ptr,
    rstd_ptr,
    dsum_ptr,
    dx_ptr,
    dw_ptr,
    M,
    H,
    blocks_per_program,
    FORM: tl.constexpr,
    HAS_DSUM: tl.constexpr,
    WANT_DW: tl.constexpr,
    ACC: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK)[None, :]
    if FORM != "bare":
        w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(ACC)
    if FORM == "gemma":
        w = 1.0 + w
    dw = tl.full((1, BLOCK), 0.0, ACC)
    for block in range(blocks_per_program):
        rows = (program * blocks_per_program + block) * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < H)
        x_at = row_starts(rows, x_inner, x_outer_stride, x_inner_stride)[:, None] + cols
        dense = rows.to(tl.int64)[:, None] * H + cols
        dy = tl.load(dy_ptr + dense, mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + x_at, mask=mask, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)[:, None]
        if HAS_DSUM:  # asked for before the reduction, which waits for the row
            passed = tl.load(dsum_ptr + dense, mask=mask, other=0.0)
        n = x * rstd
        g = dy if FORM == "bare" else dy * w
        dx = rstd * (g - n * (tl.sum(g * n, axis=1) / H)[:, None])
        if HAS_DSUM:
            dx += passed.to(ACC)
        tl.store(dx_ptr + dense, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if WANT_DW:
            if FORM == "llama":
                n = n.to(ROUND).to(ACC)
            dw += tl.sum(dy * n, axis=0)[None, :]
    if WANT_DW:
        tl.store(dw_ptr + program.to(tl.int64) * H + cols, dw, mask=cols < H)


def _tile(width: int, tile: Tile | None) -> tuple[int, int, int]:
    """(rows a program, padded width, warps): narrow rows share a program, as in the norms over heads."""
    block = triton.next_power_of_2(width)
    if tile is not None:
        return tile.rows, block, tile.warps
    rows = max(1, 2048 // block)
    return rows, block, max(4, min(16, rows * block // 512))


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    form: NormForm,
    *,
    residual: Tensor | None = None,
    where: Literal["none", "before", "after"] = "none",
    out_dtype: torch.dtype | None = None,
    quantized: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The forward in one launch, no autograd: (y, sum with the residual or None, rstd (M,)). ``out_dtype`` is y's.

    ``where`` says whether the residual is added before the norm, after it, or not at all. ``quantized``: memory for y
    quantized by rows (``ftkernels.fp8``), (M, H) in ``e4m3_store()`` and (M,) float32.
    """
    source = as_rows(x)
    acc = accumulate_dtype(x.dtype)
    width = x.shape[-1]
    y_dtype = out_dtype or norm_dtype(x.dtype, weight, form)
    if where == "after" and residual is not None:
        y_dtype = torch.promote_types(y_dtype, residual.dtype)
    y = torch.empty(x.shape, dtype=store_dtype(y_dtype), device=x.device)
    rstd = torch.empty(source.count, dtype=acc, device=x.device)
    total = None
    if residual is not None and where == "before":
        total_dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(x.shape, dtype=store_dtype(total_dtype), device=x.device)
    if source.count and width:
        rows, block, warps = _tile(width, tile)
        rounding = x.dtype if total is None else total.dtype
        q, q_scale = quantized or (y, rstd)
        with on_device_of(x):
            _forward_kernel[(triton.cdiv(source.count, rows),)](
                *source.addresses,
                x if residual is None else residual.contiguous(),
                x if weight is None else weight,
                y,
                y if total is None else total,
                rstd,
                q,
                q_scale,
                source.count,
                width,
                float(eps),
                FORM=kernel_form(weight, form),
                RESIDUAL=where,
                QUANTIZE=quantized is not None,
                ACC=triton_dtype(x.dtype),
                ROUND=triton_store_dtype(rounding),
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
    if total is not None and residual is not None:
        total = rounded(total, torch.promote_types(x.dtype, residual.dtype))
    return rounded(y, y_dtype), total, rstd


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    form: NormForm,
    *,
    d_sum: Tensor | None = None,
    want_dw: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dx in x's dtype, dw (H,) float32 or None). ``d_sum``, of x's shape, is added to dx inside."""
    source = as_rows(x)
    width = x.shape[-1]
    acc = accumulate_dtype(x.dtype)
    dx = torch.empty(x.shape, dtype=store_dtype(x.dtype), device=x.device)
    rows, block, warps = _tile(max(width, 1), tile)
    blocks = triton.cdiv(source.count, rows)
    each = max(1, triton.cdiv(blocks, _DW_PROGRAMS)) if want_dw else 1
    programs = triton.cdiv(blocks, each)
    partial = torch.empty((programs, width) if want_dw else (0,), dtype=acc, device=x.device)
    if source.count and width:
        with on_device_of(x):
            _backward_kernel[(programs,)](
                dy.contiguous(),
                *source.addresses,
                rstd if weight is None else weight,
                rstd,
                dx if d_sum is None else d_sum.contiguous(),
                dx,
                partial,
                source.count,
                width,
                each,
                FORM=kernel_form(weight, form),
                HAS_DSUM=d_sum is not None,
                WANT_DW=want_dw,
                ACC=triton_dtype(x.dtype),
                ROUND=triton_store_dtype(x.dtype),
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
            )
    return rounded(dx, x.dtype), column_sums(partial) if want_dw else None


def norm_forward_torch(
    x: Tensor, weight: Tensor | None, eps: float, form: NormForm, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(y in ``out_dtype``, rstd (M,)) of x (M, H) in plain torch, without autograd."""
    wide = x.to(accumulate_dtype(x.dtype))
    rstd = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    n = wide * rstd[:, None]
    if weight is not None:
        n = n.to(x.dtype) * weight if form == "llama" else n * _factor(weight, form, n.dtype)
    return n.to(out_dtype), rstd


def norm_backward_torch(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    form: NormForm,
    *,
    d_sum: Tensor | None = None,
    want_dw: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``norm_backward`` in plain torch."""
    wide = dy.to(rstd.dtype)
    n = x.to(rstd.dtype) * rstd[:, None]
    g = wide if weight is None else wide * _factor(weight, form, n.dtype)
    dx = rstd[:, None] * (g - n * (g * n).mean(-1, keepdim=True))
    if d_sum is not None:
        dx = dx + d_sum
    return dx.to(x.dtype), (wide * n).sum(0) if want_dw else None


def _factor(weight: Tensor, form: NormForm, dtype: torch.dtype) -> Tensor:
    """What the normalised row is multiplied by: the weight, with Gemma's 1."""
    return weight.to(dtype) + (1.0 if form == "gemma" else 0.0)
