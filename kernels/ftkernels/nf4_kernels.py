"""Triton kernel of NF4's dequantisation: one launch a weight, scales of scales included; see ``ftkernels.nf4``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype

#: Elements that one program writes, in whole blocks.
_TILE = 4096
_WARPS = 8


@triton.jit
def _dequantize_kernel(
    data,
    absmax,
    table,
    nested_absmax,
    nested_table,
    nested_offset,
    out,
    blocks,
    packed_bytes,
    elements,
    BLOCK: tl.constexpr,
    NESTED: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Offsets in 64 bits: a matrix may have more than 2^31 elements.
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = block < blocks
    if NESTED > 0:
        scale = tl.load(nested_table + tl.load(absmax + block, mask=inside, other=0).to(tl.int32))
        scale = scale * tl.load(nested_absmax + block // NESTED, mask=inside, other=0.0)
        scale = scale + tl.load(nested_offset)
    else:
        scale = tl.load(absmax + block, mask=inside, other=0.0)
    HALF: tl.constexpr = BLOCK // 2
    byte = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    packed = tl.load(data + byte, mask=byte < packed_bytes, other=0).to(tl.int32)
    high = tl.load(table + (packed >> 4))
    low = tl.load(table + (packed & 15))
    values = tl.reshape(tl.join(high, low), (ROWS, BLOCK)) * scale[:, None]
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(out + index, values.to(out.dtype.element_ty), mask=index < elements)


def dequantize_triton(
    data: Tensor,
    absmax: Tensor,
    table: Tensor,
    nested: tuple[Tensor, Tensor, Tensor, int] | None,
    out: Tensor,
    block_size: int,
) -> None:
    """Write the matrix into ``out``, contiguous; the other arguments are ``NF4Weight``'s fields, checked there.

    nested: (absmax, table, offset, block size) or None.
    """
    target = out
    if store_dtype(out.dtype) != out.dtype or out.dtype == torch.float64:
        target = torch.empty_like(out, dtype=torch.float32)
    rows = max(1, _TILE // block_size)
    nested_absmax, nested_table, nested_offset, nested_size = (
        nested if nested is not None else (absmax, table, table, 0)
    )
    with on_device_of(data):
        # Without fp_fusion: scale * absmax + offset is two roundings in bitsandbytes, and one as a fused operation.
        _dequantize_kernel[(triton.cdiv(absmax.numel(), rows),)](
            data,
            absmax,
            table,
            nested_absmax,
            nested_table,
            nested_offset,
            target,
            absmax.numel(),
            data.numel(),
            out.numel(),
            BLOCK=block_size,
            NESTED=nested_size,
            ROWS=rows,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    if target is not out:
        out.copy_(rounded(target, out.dtype))
