"""The kernels that quantize rows to e4m3 and back, and the same in plain torch. Formulas: ``ftkernels.fp8``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import interpreting, on_device_of, rounded, store_dtype
from ftkernels.limits import WIDEST_ROW

E4M3 = torch.float8_e4m3fn


@triton.jit
def _magnitude(x):
    """|x| where x is finite, else 0, so that a row with NaN in it still has a scale."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _scale_of(absmax):
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
def _scaled(x, inverse):
    """x divided by its row's scale. What is not finite becomes NaN: the cast to e4m3 would turn infinity into 448."""
    return tl.where(tl.abs(x) < float("inf"), x * inverse[:, None], float("nan"))


@triton.jit
def quantized_rows(x):
    """(x divided by its row's scale, the scales of the rows) for float32 x (rows, columns)."""
    scale, inverse = _scale_of(tl.max(_magnitude(x), axis=1))
    return _scaled(x, inverse), scale


@triton.jit
def _quantize_kernel(x_ptr, x_stride, q_ptr, scale_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    row64 = rows.to(tl.int64)[:, None]
    q, scale = quantized_rows(tl.load(x_ptr + row64 * x_stride + cols, mask=mask, other=0.0).to(tl.float32))
    tl.store(q_ptr + row64 * N + cols, q.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)


@triton.jit
def _quantize_wide_kernel(x_ptr, x_stride, q_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    """One row a program, a block of columns at a time: once for the scale and once for the values."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    size = tl.full((1, BLOCK), 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * x_stride + first + cols, mask=first + cols < N, other=0.0).to(tl.float32)
        size = tl.maximum(size, _magnitude(x))
    scale, inverse = _scale_of(tl.max(size, axis=1))
    for first in range(0, N, BLOCK):
        at, mask = first + cols, first + cols < N
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * N + at, _scaled(x, inverse).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, out_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]
    row64 = rows.to(tl.int64)[:, None]
    for first in range(0, N, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        mask = (rows < M)[:, None] & (cols < N)
        q = tl.load(q_ptr + row64 * N + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row64 * N + cols, (q * scale).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_fp8_triton(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """One launch: (M, N) in ``dtype`` of contiguous e4m3 values (M, N) and the scales (M,) of their rows."""
    count, width = data.shape
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=data.device)
    if interpreting():
        data = data.float()  # which NumPy knows
    if out.numel():
        block = min(triton.next_power_of_2(width), 2048)
        rows = max(1, 2048 // block)
        with on_device_of(data):
            grid = (triton.cdiv(count, rows),)
            _dequantize_kernel[grid](data, scale, out, count, width, ROWS=rows, BLOCK=block, num_warps=4)
    return rounded(out, dtype)


def e4m3_store() -> torch.dtype:
    """The dtype that kernels store quantized values in: e4m3, or float32 in the interpreter, which truncates."""
    return torch.float32 if interpreting() else E4M3


def quantize_fp8_triton(x: Tensor, *, widest: int = WIDEST_ROW) -> tuple[Tensor, Tensor]:
    """One launch: (e4m3 (M, N), scale (M,) float32) of x (M, N) floating. Rows above ``widest`` are read twice."""
    count, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty((count, width), dtype=e4m3_store(), device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    if not width:
        scale.fill_(1.0)
    elif count:
        block = triton.next_power_of_2(width)
        with on_device_of(x):
            if width > widest:
                block = min(widest, 8192)
                _quantize_wide_kernel[(count,)](x, x.stride(0), q, scale, width, BLOCK=block, num_warps=8)
            else:
                rows = max(1, 2048 // block)
                # Warps measured on one H200 at widths of 3584 to 28672: few for narrow rows, 32 for the widest.
                warps = 4 if block <= 8192 else block // 1024
                grid = (triton.cdiv(count, rows),)
                _quantize_kernel[grid](x, x.stride(0), q, scale, count, width, ROWS=rows, BLOCK=block, num_warps=warps)
    return q.to(E4M3), scale


def quantize_fp8_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_fp8_triton`` in plain torch: the same bits."""
    wide = x.float()
    size = wide.abs()
    finite = size < float("inf")
    absmax = torch.where(finite, size, 0.0).amax(1) if x.shape[1] else wide.new_zeros(x.shape[0])
    exponent = (((absmax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    exponent = torch.where(absmax == 0.0, 127, exponent).to(torch.int32)
    scale = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return torch.where(finite, wide * inverse[:, None], float("nan")).to(E4M3), scale
