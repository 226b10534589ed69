"""Adds up the partial sums that the programs of a kernel leave, in a fixed order and in one launch.

``row_sums`` is of the gradients of ``x @ A.T`` for each projection, which products read. Legend: P programs that each
summed a part of the columns, M rows, W = projections * padded rank.

    dxa = sum over the programs                       float32, in their order
    low = round(dxa),   scaled = round(dxa * rstd)    in the products' dtype; ``scaled`` where a norm is in front

It replaces a sum, two casts and a product of a few hundred kilobytes each, whose cost in small micro-batches
is that of their launches. ``column_sums`` is of the gradients of norms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype, triton_dtype

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
