"""The kernels of BitNet's activations: rows to int8, and the same behind an RMSNorm.

Formulas: ``ftkernels.ternary``. Rows are the same bits as in plain torch: divisions are correctly rounded, and nothing
is contracted into fused multiply-adds. A row that holds NaN or infinity has a step that is not finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, triton_store_dtype
from ftkernels.limits import WIDEST_ROW
from ftkernels.rows import as_rows
from ftkernels.ternary import SMALLEST

_SMALLEST = tl.constexpr(SMALLEST)
# Adding and taking away 1.5 * 2^23 rounds a float32 of less than 2^22 to the nearest whole number, halves to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _steps(absmax):
    """(step, 1 / step) of rows with these largest magnitudes (``_magnitude``)."""
    absmax = absmax.to(tl.float32, bitcast=True)
    absmax = tl.where(absmax < _SMALLEST, _SMALLEST, absmax)  # which leaves NaN as it is
    return tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32)), tl.div_rn(
        tl.full(absmax.shape, 127.0, tl.float32), absmax
    )


@triton.jit
def _magnitude(x):
    """The bits of |x|. As whole numbers they are in the order of the numbers, and NaN is the largest: a maximum of
    numbers passes NaN over, and a diverged model would have finite losses.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(x, inverse):
    scaled = tl.minimum(tl.maximum(x * inverse[:, None], -128.0), 127.0)
    return (scaled + _ROUNDING) - _ROUNDING


@triton.jit
def _quantize_kernel(x_ptr, x_stride, q_ptr, step_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    row64 = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    step, inverse = _steps(tl.max(_magnitude(x), axis=1))
    tl.store(q_ptr + row64 * N + cols, _rounded(x, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + rows, step, mask=rows < M)


@triton.jit
def _quantize_wide_kernel(x_ptr, x_stride, q_ptr, step_ptr, N, BLOCK: tl.constexpr):
    """One row a program, a block of columns at a time: once for the step and once for the values."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    size = tl.full((1, BLOCK), 0, tl.int32)
    for first in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * x_stride + first + cols, mask=first + cols < N, other=0.0).to(tl.float32)
        size = tl.maximum(size, _magnitude(x))
    step, inverse = _steps(tl.max(size, axis=1))
    for first in range(0, N, BLOCK):
        at, mask = first + cols, first + cols < N
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * N + at, _rounded(x, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + row + tl.arange(0, 1), step)


@triton.jit
def _norm_quantize_kernel(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    w_ptr,
    q_ptr,
    step_ptr,
    rstd_ptr,
    M,
    H,
    eps,
    N_DTYPE: tl.constexpr,
    Y_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The norm's output, rounded where the norm alone would round it, goes to int8 without being written."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < H)
    row64 = rows.to(tl.int64)
    starts = (row64 // x_inner) * x_outer_stride + (row64 % x_inner) * x_inner_stride
    x = tl.load(x_ptr + starts[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / H + eps)
    y = ((x * rstd[:, None]).to(N_DTYPE).to(tl.float32) * w).to(Y_DTYPE).to(tl.float32)
    step, inverse = _steps(tl.max(_magnitude(y), axis=1))
    tl.store(q_ptr + row64[:, None] * H + cols, _rounded(y, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + rows, step, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def _rows_a_program(width: int) -> tuple[int, int, int]:
    """(rows, padded width, warps)."""
    block = triton.next_power_of_2(width)
    return max(1, 2048 // block), block, 4 if block <= 8192 else block // 1024


def quantize_int8_triton(x: Tensor, *, widest: int = WIDEST_ROW) -> tuple[Tensor, Tensor]:
    """``ternary.quantize_int8_torch`` in one launch: the same bits. Rows above ``widest`` are read twice."""
    count, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty((count, width), dtype=torch.int8, device=x.device)
    step = torch.empty(count, dtype=torch.float32, device=x.device)
    if not width:
        return q, step.fill_(SMALLEST / 127)
    if count:
        with on_device_of(x):
            if width > widest:
                block = min(triton.next_power_of_2(widest), 8192)
                _quantize_wide_kernel[(count,)](
                    x, x.stride(0), q, step, width, BLOCK=block, num_warps=8, enable_fp_fusion=False
                )
            else:
                rows, block, warps = _rows_a_program(width)
                _quantize_kernel[(triton.cdiv(count, rows),)](
                    x,
                    x.stride(0),
                    q,
                    step,
                    count,
                    width,
                    ROWS=rows,
                    BLOCK=block,
                    num_warps=warps,
                    enable_fp_fusion=False,
                )
    return q, step


def norm_quantize_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q (M, H) int8, step (M,), rstd (M,) float32) of the llama-form RMSNorm of x (..., H), in one launch."""
    source, width = as_rows(x), x.shape[-1]
    q = torch.empty((source.count, width), dtype=torch.int8, device=x.device)
    step, rstd = (torch.empty(source.count, dtype=torch.float32, device=x.device) for _ in range(2))
    if source.count and width:
        rows, block, warps = _rows_a_program(width)
        with on_device_of(x):
            _norm_quantize_kernel[(triton.cdiv(source.count, rows),)](
                source.tensor,
                source.inner,
                source.outer_stride,
                source.inner_stride,
                weight,
                q,
                step,
                rstd,
                source.count,
                width,
                float(eps),
                N_DTYPE=triton_store_dtype(x.dtype),
                Y_DTYPE=triton_store_dtype(torch.promote_types(x.dtype, weight.dtype)),
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return q, step, rstd
