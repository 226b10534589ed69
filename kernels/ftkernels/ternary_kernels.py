"""The kernels of ternary weights: rounding masters, and int8 values times their scale. Formulas: ``ftkernels.ternary``.

Rounding reads the masters twice and writes a byte for each; in plain torch it would be ten times that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import interpreting, on_device_of, rounded, store_dtype
from ftkernels.ternary import SMALLEST

# Parts whose sums are added up in float64 (few in the interpreter, where programs cost a millisecond), and elements
# that a program takes at a time.
_PARTS, _INTERPRETED_PARTS = 1024, 4
_BLOCK = 4096
_SMALLEST = tl.constexpr(SMALLEST)
# As in ftkernels.bitlinear_kernels: rounds to the nearest whole number, halves to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _sum_kernel(w_ptr, part_ptr, count, BLOCK: tl.constexpr):
    """A part of the sum of |w|, in float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.abs(tl.load(w_ptr + at, mask=at < count, other=0.0).to(tl.float32)).to(tl.float64)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _round_kernel(w_ptr, part_ptr, t_ptr, scale_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    mean = (tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), axis=0) / count).to(tl.float32)
    scale = tl.where(mean < _SMALLEST, _SMALLEST, mean)  # which leaves NaN as it is
    inverse = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.full((1,), 0.0, tl.float32) + scale)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        near = tl.minimum(tl.maximum(w * inverse, -1.0), 1.0)
        tl.store(t_ptr + at, ((near + _ROUNDING) - _ROUNDING).to(tl.int8), mask=at < count)


@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, scale_stride, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * N + at, mask=at < N, other=0)
    out = q.to(tl.float32) * tl.load(scale_ptr + row * scale_stride)
    tl.store(out_ptr + row * N + at, out.to(out_ptr.dtype.element_ty), mask=at < N)


def ternarise_triton(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``ternary.ternarise`` of ``weight`` (O, I), of at least one element: (values (O, I) int8, scale () float32)."""
    weight = weight.detach().contiguous()
    programs = _INTERPRETED_PARTS if interpreting() else _PARTS
    parts = torch.empty(programs, dtype=torch.float64, device=weight.device)
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty((), dtype=torch.float32, device=weight.device)
    count = weight.numel()
    with on_device_of(weight):
        _sum_kernel[(programs,)](weight, parts, count, BLOCK=_BLOCK, num_warps=8)
        _round_kernel[(min(triton.cdiv(count, _BLOCK), 2 * programs),)](
            weight, parts, values, scale, count, PARTS=programs, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scale


def dequantize_int8_triton(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` (M, N) int8, contiguous, times ``scale``, one a row (M,) or one in all (): (M, N), rounded once."""
    out = torch.empty(values.shape, dtype=store_dtype(dtype), device=values.device)
    count, width = values.shape
    if count and width:
        block = min(triton.next_power_of_2(width), 2048)
        with on_device_of(values):
            _dequantize_kernel[(count, triton.cdiv(width, block))](
                values, scale, scale.stride(0) if scale.dim() else 0, out, width, BLOCK=block
            )
    return rounded(out, dtype)
