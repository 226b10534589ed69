"""The epilogue of a LoRA QKV projection in one kernel: the adapters' low-rank terms and the rotary embedding.

Legend: M = B * S rows, Hq and Hk heads, D head size, N = (Hq + 2 Hk) * D, K padded rank. For head h of part p (q, k
or v):

    y_h = rope(y0_h + xa_p @ B_h.T)          rope for q and k only; formulas in ``ftkernels.rope``

and backward, from dq, dk, dv with any strides:

    d_h = rope.T(dy_h),     dxa_p = sum over the heads of p of  d_h @ B_h

dxa is float32: a partial sum a program over its heads, the programs' sums added in a fixed order afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import (
    accumulate_dtype,
    gpu_of,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
    triton_store_dtype,
)
from ftkernels.rope import load_rotation, rotate, rotation_arguments
from ftkernels.tiles import Tile, tile_for

#: Up to so many rows a program takes one head.
FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin, (B or 1, S, D), last stride 1, and the head counts they turn."""

    cos: Tensor
    sin: Tensor
    q_heads: int
    k_heads: int

    @property
    def head_dim(self) -> int:
        """D; the whole head is rotated."""
        return int(self.cos.shape[-1])


@triton.jit
def _forward_kernel(
    y_ptr,
    xa_ptr,
    b_ptr,
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    M,
    S,
    q_heads,
    k_heads,
    N,
    heads_each,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """In place over y (M, N): a program's rows, ``heads_each`` heads of the q, k and v heads in a row."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]  # as in _heads_back: no address outside its tensor
    d = tl.arange(0, BLOCK)
    d_ok = d[None, :] < HALF
    mask = row_ok & d_ok
    k = tl.arange(0, K)
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d[None, :], mask, HALF, ACC
    )
    heads = q_heads + 2 * k_heads
    first = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * N + d[None, :]
    column = tl.minimum(first, heads - 1) * (2 * HALF)
    next1 = tl.load(y_at + column, mask=mask, other=0.0)
    next2 = tl.load(y_at + column + HALF, mask=mask, other=0.0)
    for step in range(heads_each):
        wanted = first + step
        live = wanted < heads
        head = tl.minimum(wanted, heads - 1)
        turned = head < q_heads + k_heads
        part = (head >= q_heads).to(tl.int32) + (head >= q_heads + k_heads).to(tl.int32)
        x1 = next1.to(ACC)
        x2 = next2.to(ACC)
        # The next head is asked for before this one is stored: being in place, no compiler may move it there.
        ahead = tl.minimum(wanted + 1, heads - 1) * (2 * HALF)
        more = mask & (step + 1 < heads_each)
        next1 = tl.load(y_at + ahead, mask=more, other=0.0)
        next2 = tl.load(y_at + ahead + HALF, mask=more, other=0.0)
        column = head * (2 * HALF)
        if DELTA:
            xa = tl.load(xa_ptr + row64 * (3 * K) + part * K + k[None, :], mask=row_ok, other=0.0).to(DOT)
            b_at = b_ptr + (column + d[None, :]).to(tl.int64) * K + k[:, None]
            b1 = tl.load(b_at, mask=d_ok & live, other=0.0).to(DOT)
            b2 = tl.load(b_at + HALF * K, mask=d_ok & live, other=0.0).to(DOT)
            x1 += tl.dot(xa, b1, input_precision="ieee")
            x2 += tl.dot(xa, b2, input_precision="ieee")
        y1, y2 = rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED=False)
        y1 = tl.where(turned, y1, x1)
        y2 = tl.where(turned, y2, x2)
        tl.store(y_at + column, y1.to(y_ptr.dtype.element_ty), mask=mask & live)
        tl.store(y_at + column + HALF, y2.to(y_ptr.dtype.element_ty), mask=mask & live)


@triton.jit
def _heads_back(
    dy_ptr,
    dy_batch,
    dy_head,
    dy_token,
    out_ptr,
    b_ptr,
    first_column,
    first_head,
    heads_each,
    heads,
    rows,
    M,
    S,
    N,
    c1,
    c2,
    s1,
    s2,
    TURNED: tl.constexpr,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """``heads_each`` heads of one of q, k, v: writes their columns of out, returns their sum of d_h @ B_h, (BM, K)."""
    # Rows and heads past the end are masked, and their addresses are those of the last one all the same. The loop's
    # software pipeline asks for heads that no iteration reaches; a stride further on may not be mapped at all.
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    d_ok = d[None, :] < HALF
    mask = (rows[:, None] < M) & d_ok
    dxa = tl.full((BM, K), 0.0, ACC)
    for step in range(heads_each):
        live = first_head + step < heads
        head = tl.minimum(first_head + step, heads - 1)
        head64 = tl.cast(head, tl.int64)
        dy_at = dy_ptr + (row64 // S) * dy_batch + head64 * dy_head + (row64 % S) * dy_token + d[None, :]
        g1 = tl.load(dy_at, mask=mask & live, other=0.0).to(ACC)
        g2 = tl.load(dy_at + HALF, mask=mask & live, other=0.0).to(ACC)
        if TURNED:
            x1, x2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
        else:
            x1 = g1
            x2 = g2
        column = first_column + head * (2 * HALF)
        out_at = out_ptr + row64 * N + column + d[None, :]
        tl.store(out_at, x1.to(out_ptr.dtype.element_ty), mask=mask & live)
        tl.store(out_at + HALF, x2.to(out_ptr.dtype.element_ty), mask=mask & live)
        if DELTA:
            b_at = b_ptr + (column + d[:, None]).to(tl.int64) * K + k[None, :]
            b_ok = (d[:, None] < HALF) & live
            b1 = tl.load(b_at, mask=b_ok, other=0.0).to(DOT)
            b2 = tl.load(b_at + HALF * K, mask=b_ok, other=0.0).to(DOT)
            dxa += tl.dot(x1.to(DOT), b1, input_precision="ieee")
            dxa += tl.dot(x2.to(DOT), b2, input_precision="ieee")
    return dxa


@triton.jit
def _backward_kernel(
    dq_ptr,
    dq_batch,
    dq_head,
    dq_token,
    dk_ptr,
    dk_batch,
    dk_head,
    dk_token,
    dv_ptr,
    dv_batch,
    dv_head,
    dv_token,
    out_ptr,
    b_ptr,
    dxa_ptr,
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    M,
    S,
    q_heads,
    k_heads,
    N,
    q_each,
    k_each,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """A program's rows and its share of the q, the k and the v heads; dxa_ptr is (splits, M, 3 * K)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    mask = row_ok & (d[None, :] < HALF)
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d[None, :], mask, HALF, ACC
    )
    q_width = q_heads * (2 * HALF)
    k_width = k_heads * (2 * HALF)
    dxa_q = _heads_back(
        dq_ptr, dq_batch, dq_head, dq_token, out_ptr, b_ptr, 0, split * q_each, q_each, q_heads,
        rows, M, S, N, c1, c2, s1, s2, True, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    dxa_k = _heads_back(
        dk_ptr, dk_batch, dk_head, dk_token, out_ptr, b_ptr, q_width, split * k_each, k_each, k_heads,
        rows, M, S, N, c1, c2, s1, s2, True, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    dxa_v = _heads_back(
        dv_ptr, dv_batch, dv_head, dv_token, out_ptr, b_ptr, q_width + k_width, split * k_each, k_each, k_heads,
        rows, M, S, N, c1, c2, s1, s2, False, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if DELTA:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row64) * (3 * K) + tl.arange(0, K)[None, :]
        tl.store(dxa_at, dxa_q, mask=row_ok)
        tl.store(dxa_at + K, dxa_k, mask=row_ok)
        tl.store(dxa_at + 2 * K, dxa_v, mask=row_ok)


def _constants(head_dim: int, b: Tensor | None, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """The constexpr arguments and the launch options that both kernels take."""
    half = head_dim // 2
    return {
        "DELTA": b is not None,
        "HALF": half,
        "BLOCK": max(16, triton.next_power_of_2(half)),
        "K": 16 if b is None else b.shape[1],
        "ACC": triton_dtype(dtype),
        "DOT": triton_store_dtype(dtype),
        "BM": tile.rows,
        "num_warps": tile.warps,
    }


def qkv_rope_forward(
    y: Tensor, xa: Tensor | None, b: Tensor | None, rotary: Rotary, *, tile: Tile | None = None
) -> Tensor:
    """Add the low-rank terms to ``y`` (M, N) and rotate its q and k heads, in place; returns ``y``.

    Shapes: xa (M, 3 * K), b (N, K), both contiguous or both None.
    """
    count, width = y.shape
    heads = rotary.q_heads + 2 * rotary.k_heads
    stored = y.to(store_dtype(y.dtype))  # y itself, except in the interpreter
    tile = tile or tile_for("qkv_rope_forward_few" if count <= FEW_ROWS else "qkv_rope_forward")
    each = min(tile.columns, heads)
    if count:
        with on_device_of(y):
            _forward_kernel[(triton.cdiv(count, tile.rows), triton.cdiv(heads, each))](
                stored,
                stored if xa is None else xa,
                stored if b is None else b,
                *rotation_arguments(rotary.cos, rotary.sin),
                count,
                rotary.cos.shape[1],
                rotary.q_heads,
                rotary.k_heads,
                width,
                each,
                **_constants(rotary.head_dim, b, y.dtype, tile),
            )
    return rounded(stored, y.dtype)


def backward_tile(shared_memory: int, head_size: int, rank: int) -> Tile:
    """The backward's tile where a program can have ``shared_memory`` bytes: it grows with the adapters' padded rank."""
    # What Triton 3.7 takes for compute capabilities 8.0 to 9.0 in half precision, by `kernels/bench/offline.py`.
    padded = 2 * max(16, int(triton.next_power_of_2(head_size // 2)))
    return tile_for("qkv_rope_backward", lambda t: padded * (5 * t.rows + 4 * rank) <= shared_memory)


def qkv_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    b: Tensor | None,
    rotary: Rotary,
    dtype: torch.dtype,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(d (M, N) in ``dtype``, dxa or None: its partial sums (P, M, 3 * K) in the accumulation dtype, for
    ``ftkernels.row_sums``), from dq, dk, dv (B, heads, S, D).
    """
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    batch, _, seq_len, head_dim = dq.shape
    count = batch * seq_len
    width = (rotary.q_heads + 2 * rotary.k_heads) * head_dim
    rank = 0 if b is None else b.shape[1]
    tile = tile or backward_tile(gpu_of(dq.device).shared_memory_bytes, head_dim, rank)
    splits = triton.cdiv(rotary.q_heads, tile.columns)
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=dq.device)
    sums = (1,) if b is None else (splits, count, 3 * rank)
    dxa = torch.empty(sums, dtype=accumulate_dtype(dtype), device=dq.device)
    if count:
        with on_device_of(dq):
            _backward_kernel[(triton.cdiv(count, tile.rows), splits)](
                dq,
                *dq.stride()[:3],
                dk,
                *dk.stride()[:3],
                dv,
                *dv.stride()[:3],
                out,
                out if b is None else b,
                dxa,
                *rotation_arguments(rotary.cos, rotary.sin),
                count,
                seq_len,
                rotary.q_heads,
                rotary.k_heads,
                width,
                triton.cdiv(rotary.q_heads, splits),
                triton.cdiv(rotary.k_heads, splits),
                **_constants(head_dim, b, dtype, tile),
            )
    return rounded(out, dtype), None if b is None else dxa
