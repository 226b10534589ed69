"""The gradients of ``x @ A.T`` for each projection, from the partial sums that kernels leave, as products read them.

Legend: P programs that each summed a part of the columns, M rows, W = projections * padded rank.

    dxa = sum over the programs                       float32, in their order
    low = round(dxa),   scaled = round(dxa * rstd)    in the products' dtype; ``scaled`` where a norm is in front

One launch in place of a sum, two casts and a product of a few hundred kilobytes each: in micro-batches of few tokens
what they take is their launches.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype, triton_dtype

_BLOCK = 1024


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
