"""The epilogue of a LoRA QKV projection in one kernel: the adapters' low-rank terms and the rotary embedding.

Legend: M = B * S rows, Hq and Hk heads, D head size, N = (Hq + 2 Hk) * D, K padded rank. For head h of part p (q, k
or v):

    y_h = rope(y0_h + xa_p @ B_h.T)          rope for q and k only; formulas and layouts in ``ftkernels.rope``

and backward, from dq, dk, dv with any strides:

    d_h = rope.T(dy_h),     dxa_p = sum over the heads of p of  d_h @ B_h

dxa is float32: a partial sum a program over its heads, the programs' sums added in a fixed order afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, gpu_of, on_device_of, rounded, store_dtype, tile_for
from ftkernels.qkv_backward import qkv_backward
from ftkernels.qkv_parts import FEW_ROWS, Rotary, qkv_constants
from ftkernels.rope import features, lane_gap, lanes, load_features, load_rotation, rotate, store_features


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
    JOINED: tl.constexpr,
    HALF: tl.constexpr,
    ROT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """In place over y (M, N): a program's rows, ``heads_each`` heads of the q, k and v heads in a row."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]  # no address outside its tensor
    d = tl.arange(0, BLOCK)
    d_ok = d[None, :] < HALF
    mask = row_ok & d_ok
    first = lanes(HALF, ROT, PAIRS, BLOCK)
    gap = lane_gap(first, HALF, ROT, PAIRS)
    f, f_ok = features(HALF, ROT, PAIRS, BLOCK)
    read = row_ok & f_ok[None, :]
    k = tl.arange(0, K)
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d[None, :], mask, HALF, ROT, PAIRS, ACC
    )
    heads = q_heads + 2 * k_heads
    first_head = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * N + f[None, :]
    column = tl.minimum(first_head, heads - 1) * (2 * HALF)
    next1, next2 = load_features(y_at + column, gap, read, PAIRS, y_ptr.dtype.element_ty)
    for step in range(heads_each):
        wanted = first_head + step
        live = wanted < heads
        head = tl.minimum(wanted, heads - 1)
        turned = head < q_heads + k_heads
        part = (head >= q_heads).to(tl.int32) + (head >= q_heads + k_heads).to(tl.int32)
        x1 = next1.to(ACC)
        x2 = next2.to(ACC)
        # The next head is asked for before this one is stored: being in place, no compiler may move it there.
        ahead = tl.minimum(wanted + 1, heads - 1) * (2 * HALF)
        more = read & (step + 1 < heads_each)
        next1, next2 = load_features(y_at + ahead, gap, more, PAIRS, y_ptr.dtype.element_ty)
        column = head * (2 * HALF)
        if DELTA:
            xa_at = xa_ptr + row64 * K if JOINED else xa_ptr + row64 * (3 * K) + part * K
            xa = tl.load(xa_at + k[None, :], mask=row_ok, other=0.0).to(DOT)
            b_at = b_ptr + (column + first[None, :]).to(tl.int64) * K + k[:, None]
            b1 = tl.load(b_at, mask=d_ok & live, other=0.0).to(DOT)
            b2 = tl.load(b_at + gap * K, mask=d_ok & live, other=0.0).to(DOT)
            x1 += tl.dot(xa, b1, input_precision="ieee")
            x2 += tl.dot(xa, b2, input_precision="ieee")
        y1, y2 = rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED=False)
        y1 = tl.where(turned, y1, x1)
        y2 = tl.where(turned, y2, x2)
        store_features(y_at + column, gap, y1, y2, read & live, PAIRS)


def qkv_rope_forward(
    y: Tensor, xa: Tensor | None, b: Tensor | None, rotary: Rotary, *, tile: Tile | None = None
) -> Tensor:
    """Add the low-rank terms to ``y`` (M, N) and rotate its q and k heads, in place; returns ``y``.

    Shapes: xa (M, 3 * K or K), b (N, K), both contiguous or both None.
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
                *rotary.arguments(),
                count,
                rotary.seq_len,
                rotary.q_heads,
                rotary.k_heads,
                width,
                each,
                **qkv_constants(rotary, b, y.dtype, tile),
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
    """(d (M, N) in ``dtype``, dxa or None: its partial sums (P, M, 3 * K or K) in the accumulation dtype, for
    ``ftkernels.primitives``), from dq, dk, dv (B, heads, S, D).
    """
    rank = 0 if b is None else b.shape[1]
    tile = tile or backward_tile(gpu_of(dq.device).shared_memory_bytes, rotary.head_dim, rank)
    found = qkv_backward((dq, dk, dv), b, rotary, dtype, tile)
    return found.d, found.dxa
