"""``scale * (y + xa @ b.T) + residual`` in one pass over y, for low ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import on_device_of, rounded, store_dtype, triton_dtype, triton_store_dtype
from ftkernels.tiles import Tile, tile_for


@triton.jit
def _add_kernel(
    y_ptr,
    y_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    res_ptr,
    out_ptr,
    out_stride,
    M,
    N,
    HAS_DELTA: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """One (BM, BN) tile; out may be y."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    row64 = rows.to(tl.int64)[:, None]
    row_ok = rows[:, None] < M
    col_ok = cols[None, :] < N
    mask = row_ok & col_ok
    total = tl.load(y_ptr + row64 * y_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if HAS_DELTA:
        k = tl.arange(0, K)
        xa = tl.load(xa_ptr + row64 * xa_stride + k[None, :], mask=row_ok, other=0.0).to(DOT)
        b = tl.load(b_ptr + cols.to(tl.int64)[None, :] * K + k[:, None], mask=col_ok, other=0.0).to(DOT)
        total += tl.dot(xa, b, input_precision="ieee")
    if SCALE != 1.0:
        total *= SCALE
    if HAS_RESIDUAL:
        total += tl.load(res_ptr + row64 * N + cols[None, :], mask=mask, other=0.0).to(ACC)
    tl.store(out_ptr + row64 * out_stride + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=mask)


def lowrank_add(
    y: Tensor,
    xa: Tensor | None,
    b: Tensor | None,
    residual: Tensor | None,
    *,
    triton_kernel: bool,
    scale: float = 1.0,
    tile: Tile | None = None,
) -> Tensor:
    """``scale * (y + xa @ b.T) + residual``; over ``y`` itself when the result has its dtype.

    Shapes: y (M, N), rows any stride, the caller's own; xa (M, K) rows any stride; b (N, K) contiguous; residual (M,
    N). The result has the dtype that y and the residual promote to. Without the kernel, the same in torch. ``scale`` is
    of what is added to a residual.
    """
    if (xa is None or b is None) and residual is None:
        return y
    dtype = y.dtype if residual is None else torch.promote_types(y.dtype, residual.dtype)
    if not triton_kernel:
        if xa is not None and b is not None:
            y.addmm_(xa, b.t())
        return y if residual is None else torch.add(residual, y, alpha=scale)
    stored = store_dtype(dtype)
    out = y if y.dtype == stored else torch.empty(y.shape, dtype=stored, device=y.device)
    rows, columns = y.shape
    tile = tile or tile_for("lowrank_add")
    if rows and columns:
        with on_device_of(y):
            _add_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns))](
                y,
                y.stride(0),
                y if xa is None else xa,
                0 if xa is None else xa.stride(0),
                y if b is None else b,
                y if residual is None else residual.contiguous(),
                out,
                out.stride(0),
                rows,
                columns,
                HAS_DELTA=xa is not None and b is not None,
                HAS_RESIDUAL=residual is not None,
                SCALE=scale,
                K=16 if b is None else b.shape[1],
                ACC=triton_dtype(y.dtype),
                DOT=triton_store_dtype(y.dtype),
                BM=tile.rows,
                BN=tile.columns,
                num_warps=tile.warps,
            )
    if out is not y and dtype == y.dtype:
        # Only in the interpreter: the caller may hold a slice of a larger output, so the rounded result goes into it.
        return y.copy_(out)
    return rounded(out, dtype)
