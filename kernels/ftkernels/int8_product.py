"""The product of int8 rows and int8 weights on tensor cores, with its scales: (q tᵀ) * step * scale + bias.

Two kernels give the same bits. One reads by addresses, on every GPU with int8 products, for any sizes. The other has
the GPU copy whole tiles by descriptors, on capability 9.0, where rows begin at multiples of 16 bytes. Sums are whole
numbers, so tiles change nothing; scales are multiplied in one order, and nothing is contracted into fused
multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ftkernels.device import gpu_of, interpreting, on_device_of, rounded, store_dtype

#: Bytes that the rows of a described tensor begin at multiples of.
_ALIGNED = 16
#: Tiles go through so many tiles of rows together, so that L2 keeps both operands.
_GROUP = 8


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Rows, columns and depth of a tile, warps of a program, and stages of its loop.

    ``described``: it is copied by descriptors.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    described: bool = False


#: For rows of single tokens, for few, for many, and for many where there are descriptors. Measured on one H200 (torch
#: 2.11, Triton 3.6, 2026-11-22, `kernels/bench/tune.py --only int8`). With tiles of 128 x 128 two programs share
#: a multiprocessor, and one multiplies while the other writes: 10% faster than 128 x 256.
FEWEST = ProductTile(16, 32, 256, 4, 5)
FEW = ProductTile(64, 128, 128, 4, 4)
MANY = ProductTile(128, 128, 128, 4, 3)
MANY_DESCRIBED = ProductTile(128, 128, 128, 4, 3, described=True)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a tile in the order that keeps both operands in L2."""
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@triton.jit
def _scaled(total, step, scale, bias_ptr, n, N, BIAS: tl.constexpr):
    out = total.to(tl.float32) * step[:, None] * scale
    if BIAS:
        out = out + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def _by_address_kernel(
    q_ptr,
    t_ptr,
    out_ptr,
    step_ptr,
    scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    at_m, at_n = _place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    m, n = at_m * BLOCK_M + tl.arange(0, BLOCK_M), at_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows beyond the end are read again from the beginning, and not written.
    q_at = q_ptr + (m % M).to(tl.int64)[:, None] * K + k[None, :]
    t_at = t_ptr + (n % N).to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        if WHOLE:
            q = tl.load(q_at)
            t = tl.load(t_at)
        else:
            q = tl.load(q_at, mask=start + k[None, :] < K, other=0)
            t = tl.load(t_at, mask=start + k[:, None] < K, other=0)
        total = tl.dot(q, t, total, out_dtype=tl.int32)
        q_at += BLOCK_K
        t_at += BLOCK_K
    step = tl.load(step_ptr + m, mask=m < M, other=0.0)
    out = _scaled(total, step, tl.load(scale_ptr), bias_ptr, n, N, BIAS)
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m.to(tl.int64)[:, None] * N + n[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _described_kernel(
    q_tiles,
    t_tiles,
    out_tiles,
    step_ptr,
    scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Beyond the end tiles are read as zeros and not written: what copies them knows the sizes."""
    HALF: tl.constexpr = BLOCK_N // 2
    at_m, at_n = _place(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    at_m *= BLOCK_M
    at_n *= BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        total = tl.dot(q_tiles.load([at_m, start]), t_tiles.load([at_n, start]).T, total, out_dtype=tl.int32)
    m = at_m + tl.arange(0, BLOCK_M)
    step, scale = tl.load(step_ptr + m, mask=m < M, other=0.0), tl.load(scale_ptr)
    # By halves, which leaves shared memory for a second program.
    left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    n = at_n + tl.arange(0, HALF)
    out_tiles.store([at_m, at_n], _scaled(left, step, scale, bias_ptr, n, N, BIAS).to(out_tiles.dtype))
    n += HALF
    out_tiles.store([at_m, at_n + HALF], _scaled(right, step, scale, bias_ptr, n, N, BIAS).to(out_tiles.dtype))


def int8_product(
    q: Tensor,
    step: Tensor,
    ternary: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    tile: ProductTile | None = None,
) -> Tensor:
    """(q tᵀ) * step * scale + bias in ``dtype``: (M, K) and (N, K) int8 -> (M, N), one launch. M and K are not 0.

    ``tile`` is chosen by the sizes; one that is given has to suit them.
    """
    (count, inner), outer = q.shape, ternary.shape[0]
    out = torch.empty((count, outer), dtype=store_dtype(dtype), device=q.device)
    if not outer:
        return out.to(dtype)
    q, ternary = q.contiguous(), ternary.contiguous()
    tile = tile or _tile_for(q, ternary, out)
    grid = (triton.cdiv(count, tile.rows) * triton.cdiv(outer, tile.columns),)
    shared: dict[str, Any] = {
        "BIAS": bias is not None,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": _GROUP,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
    added = step if bias is None else bias
    with on_device_of(q):
        if tile.described:
            described = (
                TensorDescriptor.from_tensor(q, [tile.rows, tile.depth]),
                TensorDescriptor.from_tensor(ternary, [tile.columns, tile.depth]),
                TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2]),
            )
            _described_kernel[grid](*described, step, scale, added, count, outer, inner, **shared)
        else:
            _by_address_kernel[grid](
                q, ternary, out, step, scale, added, count, outer, inner, WHOLE=inner % tile.depth == 0, **shared
            )
    return rounded(out, dtype)


def _tile_for(q: Tensor, ternary: Tensor, out: Tensor) -> ProductTile:
    if q.shape[0] <= 256 or interpreting():
        return FEWEST if q.shape[0] <= FEWEST.rows and not interpreting() else FEW
    capability = gpu_of(q.device).capability
    hopper = capability is not None and capability[0] == 9  # later GPUs have less shared memory, or other products
    return MANY_DESCRIBED if hopper and describable(q, ternary, out) else MANY


def describable(*tensors: Tensor) -> bool:
    """True when tensors (rows, columns), and each of their rows, begin where descriptors can read."""
    return all(
        each.data_ptr() % _ALIGNED == 0 and each.stride(0) * each.element_size() % _ALIGNED == 0 for each in tensors
    )
