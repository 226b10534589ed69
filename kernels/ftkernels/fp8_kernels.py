"""The kernel that quantises rows to e4m3, its launch, and the same in plain torch. Formulas: ``ftkernels.fp8``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import interpreting, on_device_of

E4M3 = torch.float8_e4m3fn
# A program holds a whole row in registers; wider rows take the torch form.
WIDEST_ROW = 32768


@triton.jit
def e4m3_scale(absmax):
    """(scale, 1 / scale): the smallest power of two, of at least 2^-126, that brings ``absmax`` to at most 448; 1 for
    zero.
    """
    # 448 = 1.75 * 2^8: the sum carries into the exponent just where the significand is larger than 1.75.
    exponent = tl.maximum(((absmax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    exponent = tl.where(absmax == 0.0, 127, exponent)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def quantized_rows(x):
    """(x over its row's scale, NaN where x is not finite; the rows' scales) of float32 (rows, columns)."""
    size = tl.abs(x)
    finite = size < float("inf")
    scale, inverse = e4m3_scale(tl.max(tl.where(finite, size, 0.0), axis=1))
    return tl.where(finite, x * inverse[:, None], float("nan")), scale


@triton.jit
def _quantize_kernel(
    x_ptr,
    x_stride,
    factor_ptr,
    q_ptr,
    scale_ptr,
    M,
    N,
    HAS_FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    row64 = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        x *= tl.load(factor_ptr + cols, mask=cols < N, other=0.0)
    q, scale = quantized_rows(x)
    tl.store(q_ptr + row64 * N + cols, q.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)


def e4m3_store() -> torch.dtype:
    """What kernels store quantised values in: e4m3; in the interpreter, which truncates, float32 for torch to round."""
    return torch.float32 if interpreting() else E4M3


def quantize_rows_triton(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """One launch: (e4m3 (M, N), scale (M,) float32) of x (M, N), at most ``WIDEST_ROW`` wide, times ``factor`` (N,)."""
    count, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty((count, width), dtype=e4m3_store(), device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    if count and width:
        block = triton.next_power_of_2(width)
        rows = max(1, 2048 // block)
        with on_device_of(x):
            _quantize_kernel[(triton.cdiv(count, rows),)](
                x,
                x.stride(0),
                x if factor is None else factor.contiguous(),
                q,
                scale,
                count,
                width,
                HAS_FACTOR=factor is not None,
                ROWS=rows,
                BLOCK=block,
                num_warps=max(4, min(16, rows * block // 512)),
            )
    return q.to(E4M3), scale


def quantize_rows_torch(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """``quantize_rows_triton`` in plain torch: the same bits."""
    wide = x.float() if factor is None else x.float() * factor
    size = wide.abs()
    finite = size < float("inf")
    absmax = torch.where(finite, size, 0.0).amax(1) if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
    exponent = (((absmax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    exponent = torch.where(absmax == 0.0, 127, exponent).to(torch.int32)
    scale = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return torch.where(finite, wide * inverse[:, None], float("nan")).to(E4M3), scale
