"""What kernels share: gated units and their derivatives, tensors as rows, and the sums of what programs leave.

Partial sums are added up in a fixed order and in one launch.

``row_sums`` is of the gradients of ``x @ A.T`` for each projection, which products read. Legend: P programs that each
summed a part of the columns, M rows, W = projections * padded rank.

    dxa = sum over the programs                       float32, in their order
    low = round(dxa),   scaled = round(dxa * rstd)    in the products' dtype; ``scaled`` where a norm is in front

It replaces a sum, two casts and a product of a few hundred kilobytes each, whose cost in small micro-batches
is that of their launches. ``column_sums`` is of the gradients of norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype, triton_dtype

#: exp(x) is 2 to this times x, which a GPU does in one instruction: four for exp itself, which minds denormal numbers.
LOG2_E = tl.constexpr(1.4426950408889634)
#: gpt-oss's clamped unit: the slope inside the sigmoid, and the largest gate and up.
CLAMPED_SLOPE, CLAMPED_LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without an exp that overflows."""
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """(act(x), act'(x)) for ACT in silu, gelu_tanh, gelu, relu2; what is not used is dropped by the compiler."""
    if ACT == "silu":
        s = sigmoid(x)
        value = x * s
        slope = s * (1.0 + x * (1.0 - s))
    elif ACT == "gelu_tanh":
        # (1 + tanh(y)) / 2 is sigmoid(2y), and 1 + tanh would cancel for negative x: 1e-5 is lost at x = -3.
        y = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        e = tl.exp2(tl.abs(y) * -LOG2_E)
        big = 1.0 / (1.0 + e)
        small = e * big
        s = tl.where(y < 0, small, big)
        value = x * s
        slope = s + x * (big * small) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif ACT == "gelu":
        phi = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * phi
        slope = phi + x * 0.3989422804014327 * tl.exp2(x * x * (-0.5 * LOG2_E))
    else:
        tl.static_assert(ACT == "relu2")
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def gated_unit(g, u, UNIT: tl.constexpr):
    """(h, dh/dg, dh/du) of act(g) * u, or for ``clamped`` of g' sigmoid(1.702 g') (u' + 1) with g' = min(g, 7) and u'
    between -7 and 7: what is beyond has no gradient. NaN stays NaN.
    """
    if UNIT == "clamped":
        gate = tl.where(g > CLAMPED_LIMIT, CLAMPED_LIMIT, g)
        up = 1.0 + tl.where(u > CLAMPED_LIMIT, CLAMPED_LIMIT, tl.where(u < -CLAMPED_LIMIT, -CLAMPED_LIMIT, u))
        s = sigmoid(gate * CLAMPED_SLOPE)
        value = gate * s
        slope = tl.where(g > CLAMPED_LIMIT, 0.0, s * (1.0 + gate * CLAMPED_SLOPE * (1.0 - s)))
        h, by_gate, by_up = value * up, slope * up, tl.where(tl.abs(u) > CLAMPED_LIMIT, 0.0, value)
    else:
        value, slope = activate(g, UNIT)
        h, by_gate, by_up = value * u, slope * u, value
    return h, by_gate, by_up


@triton.jit
def row_starts(rows, inner, outer_stride, inner_stride):
    """The first elements of ``rows`` of a :class:`StridedRows`, int64."""
    rows = rows.to(tl.int64)
    return (rows // inner) * outer_stride + (rows % inner) * inner_stride


@dataclass(frozen=True, slots=True)
class StridedRows:
    """``tensor`` as (count, width): row i starts at ``(i // inner) * outer_stride + (i % inner) * inner_stride``."""

    tensor: Tensor
    count: int
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def addresses(self) -> tuple[Tensor, int, int, int]:
        """All but the count, as kernels take them."""
        return self.tensor, self.inner, self.outer_stride, self.inner_stride


def as_rows(x: Tensor) -> StridedRows:
    """Collapse the leading dimensions of ``x`` (..., width) into at most two strides; copies only when that cannot be.

    A slice of heads out of a fused projection, (B, S, heads, D), needs two strides and no copy.
    """
    groups = _stride_groups(x) if x.dim() and (x.stride(-1) == 1 or x.shape[-1] <= 1) else None
    if groups is None or len(groups) > 2:
        x = x.contiguous()
        groups = _stride_groups(x)
    count = prod(x.shape[:-1])
    if not groups:
        return StridedRows(x, count, 1, 0, 0)
    if len(groups) == 1:
        return StridedRows(x, count, 1, groups[0][1], 0)
    return StridedRows(x, count, groups[1][0], groups[0][1], groups[1][1])


def _stride_groups(x: Tensor) -> list[tuple[int, int]]:
    """Leading dimensions merged where one stride covers them: [(size, stride)], outermost first."""
    groups: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    return groups


_BLOCK = 1024
#: Rows and columns that a program of ``column_sums`` reads at once.
_ROWS, _COLUMNS = 128, 32


class RowSums(NamedTuple):
    """(M, W) each, in the products' dtype; ``scaled`` is None where there is no norm."""

    low: Tensor
    scaled: Tensor | None


@triton.jit
def _sum_kernel(
    partial_ptr,
    rstd_ptr,
    low_ptr,
    scaled_ptr,
    count,
    programs,
    W,
    SCALED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.full((BLOCK,), 0.0, ACC)
    for program in range(programs):
        total += tl.load(partial_ptr + tl.cast(program, tl.int64) * count + at, mask=mask, other=0.0)
    tl.store(low_ptr + at, total.to(low_ptr.dtype.element_ty), mask=mask)
    if SCALED:
        scaled = total * tl.load(rstd_ptr + at // W, mask=mask, other=0.0)
        tl.store(scaled_ptr + at, scaled.to(scaled_ptr.dtype.element_ty), mask=mask)


def row_sums(partial: Tensor, rstd: Tensor | None, dtype: torch.dtype, *, triton_kernel: bool) -> RowSums:
    """The module docstring's sums of ``partial`` (P, M, W), contiguous, float32 (float64); ``rstd`` (M,) likewise."""
    if not triton_kernel:
        total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
        return RowSums(total.to(dtype), None if rstd is None else (total * rstd[:, None]).to(dtype))
    low = torch.empty(partial.shape[1:], dtype=store_dtype(dtype), device=partial.device)
    scaled = low if rstd is None else torch.empty_like(low)
    if low.numel():
        with on_device_of(partial):
            _sum_kernel[(triton.cdiv(low.numel(), _BLOCK),)](
                partial,
                partial if rstd is None else rstd,
                low,
                scaled,
                low.numel(),
                partial.shape[0],
                low.shape[1],
                SCALED=rstd is not None,
                ACC=triton_dtype(partial.dtype),
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return RowSums(rounded(low, dtype), None if rstd is None else rounded(scaled, dtype))


@triton.jit
def _columns_kernel(x_ptr, out_ptr, rows, W, ACC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((ROWS, COLUMNS), 0.0, ACC)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * W + columns[None, :]
        total += tl.load(x_ptr + at, mask=(row < rows)[:, None] & (columns < W)[None, :], other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, axis=0), mask=columns < W)


def column_sums(partial: Tensor) -> Tensor:
    """(P, W), contiguous, float32 (float64) -> (W,), by the kernel."""
    rows, width = partial.shape
    out = torch.empty(width, dtype=partial.dtype, device=partial.device)
    if width:
        with on_device_of(partial):
            _columns_kernel[(triton.cdiv(width, _COLUMNS),)](
                partial,
                out,
                rows,
                width,
                ACC=triton_dtype(partial.dtype),
                ROWS=_ROWS,
                COLUMNS=_COLUMNS,
                num_warps=4,
            )
    return out
