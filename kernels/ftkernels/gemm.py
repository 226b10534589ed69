"""Matrix products with the precision spelled out: what is accumulated, what is written, and checked in-place forms.

``lowrank_add`` is ``scale * (y + xa @ b.T) + residual`` in one pass over y, for low ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, on_device_of, rounded, store_dtype, tile_for, triton_dtype, triton_store_dtype

_HALF = (torch.bfloat16, torch.float16)


def mm_accurate(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``a @ b``, written in float32 for half-precision operands (nothing is rounded to half on the way), else in
    their own dtype; into ``out`` where one is given.

    Shapes: a (M, K), b (K, N) -> (M, N). Both operands have one dtype.

    Raises:
        ValueError: the operands' dtypes differ, or ``out`` has another dtype than the product.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"mm_accurate needs operands of one dtype, got {a.dtype} and {b.dtype}")
    if out is not None:
        return _mm_accurate_into(out, a, b)
    if a.dtype not in _HALF:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _mm_accurate_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if out.dtype != (torch.float32 if a.dtype in _HALF else a.dtype):
        raise ValueError(f"mm_accurate cannot write a product of {a.dtype} into {out.dtype}")
    if a.dtype not in _HALF:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_mm_accurate_(out: Tensor, a: Tensor, b: Tensor, *, rows: int) -> Tensor:
    """``out += a @ b`` in place, where ``out`` is as wide as what ``mm_accurate`` gives: one GEMM, except for half
    precision off the GPU, which has a temporary of at most ``rows`` rows of ``out``.

    Shapes: out (M, N), a (M, K), b (K, N).

    Raises:
        ValueError: the operands' dtypes differ, or ``out`` has another dtype than the product.
    """
    if a.dtype != b.dtype or out.dtype != (torch.float32 if a.dtype in _HALF else a.dtype):
        raise ValueError(f"add_mm_accurate_ cannot add a product of {a.dtype} and {b.dtype} to {out.dtype}")
    if a.dtype not in _HALF:
        return out.addmm_(a, b)
    if a.is_cuda:
        return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    for part, left in zip(out.split(rows), a.split(rows), strict=True):
        part += mm_accurate(left, b)
    return out


def add_mm_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``out += a @ b`` in place, in one GEMM.

    Shapes: out (M, N), a (M, K), b (K, N).

    Raises:
        ValueError: dtypes differ, shapes disagree, or ``out`` shares memory with an operand.
    """
    if not (out.dtype == a.dtype == b.dtype):
        raise ValueError(f"add_mm_ needs one dtype, got out {out.dtype}, a {a.dtype}, b {b.dtype}")
    if out.shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
        raise ValueError(f"add_mm_ shapes disagree: {tuple(out.shape)} += {tuple(a.shape)} @ {tuple(b.shape)}")
    if out.numel() and out.untyped_storage().data_ptr() in (
        a.untyped_storage().data_ptr(),
        b.untyped_storage().data_ptr(),
    ):
        raise ValueError("add_mm_ cannot write into the storage of one of its operands")
    return out.addmm_(a, b)


def compute_dtype(device_type: str, *tensors: Tensor | None) -> torch.dtype:
    """The dtype in which a product of these tensors is taken: autocast's when it is on, else what they promote to.

    Autocast leaves float64 alone, and so does this.

    Raises:
        ValueError: no tensor was given.
    """
    present = [t.dtype for t in tensors if t is not None]
    if not present:
        raise ValueError("compute_dtype needs a tensor")
    dtype = present[0]
    for other in present[1:]:
        dtype = torch.promote_types(dtype, other)
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


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
