"""The epilogue of a QKV projection in one kernel: low-rank terms, norms of queries and keys, the rotary embedding.

Legend: M = B * S rows, Hq and Hk heads, D head size, N = (Hq + 2 Hk) * D, K padded rank. For head h of part p (q, k
or v), with the low-rank terms of adapters where there are any:

    x_h = y0_h + xa_p @ B_h.T
    n_h = x_h / sqrt(mean(x_h^2) + eps)          float32, over D
    y_h = rope(n_h * w_p)                        q and k only; forms as in ``ftkernels.rms_norm``, w + 1 for Gemma's

The mean is over all heads of p where the norm is over the width (OLMo-2, OLMo-3), w_p then a row for each head, and the
sums come from ``ftkernels.qkv_parts``, which adds the low-rank terms. ``rope`` may be nothing, or be taken of x_h in
front of the norm (HunYuan), and there may be no w. Backward, from dq, dk, dv with any strides, n formed again from x:

    g_h = rope.T(dy_h),   gw = g_h * w_p,   d_h = rstd * (gw - n_h * mean(gw * n_h))      d_h = dy_h for v
    dw_p = sum over rows and the heads of p of  g_h * n_h
    dxa_p = sum over the heads of p of  d_h @ B_h

dw and dxa are float32: partial sums a program, added in a fixed order afterwards.

Without norms (``qkv_rope_forward``) it is done in place:

    y_h = rope(y0_h + xa_p @ B_h.T)          rope for q and k only; formulas and layouts in ``ftkernels.rope``
    d_h = rope.T(dy_h)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, gpu_of, on_device_of, rounded, store_dtype, tile_for, triton_store_dtype
from ftkernels.primitives import column_sums
from ftkernels.qkv_backward import contiguous_heads, qkv_backward
from ftkernels.qkv_parts import (
    FEW_ROWS,
    HeadNorms,
    Rotary,
    group_sum,
    head_rstd,
    head_weights,
    qkv_constants,
    width_squares,
    width_sums,
)
from ftkernels.rope import features, lane_gap, lanes, load_features, load_rotation, rotate, store_features


class HeadGrads(NamedTuple):
    """d (M, N); dxa, its partial sums (P, M, 3 * K or K) in the accumulation dtype for ``ftkernels.primitives``; and
    the norms' gradients, of their weights' sizes, in that dtype. None of what is not there or was not wanted.
    """

    d: Tensor
    dxa: Tensor | None
    dw_q: Tensor | None
    dw_k: Tensor | None


@triton.jit
def width_rstd(at, ok, width, eps, GROUPS: tl.constexpr, ACC: tl.constexpr):
    """(rows, 1), from the sums of squares (rows, GROUPS) at ``at``."""
    return 1.0 / tl.sqrt(group_sum(at, ok, GROUPS) / width + tl.cast(eps, ACC))


@triton.jit
def width_weights(wq_ptr, wk_ptr, column, q_width, lane, gap, ok, FORM: tl.constexpr, ACC: tl.constexpr):
    """``head_weights`` of the head at ``column`` of q and k, whose norms have a weight for each column."""
    if FORM == "bare":
        w1, w2 = head_weights(wq_ptr, lane, gap, ok, FORM, ACC)
    else:
        of_q = column < q_width
        q1, q2 = head_weights(wq_ptr + column, lane, gap, ok & of_q, FORM, ACC)
        k1, k2 = head_weights(wk_ptr + (column - q_width), lane, gap, ok & (column >= q_width), FORM, ACC)
        w1 = tl.where(of_q, q1, k1)
        w2 = tl.where(of_q, q2, k2)
    return w1, w2


@triton.jit
def _forward_kernel(
    y_ptr,
    out_ptr,
    xa_ptr,
    b_ptr,
    wq_ptr,
    wk_ptr,
    squares_ptr,
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
    heads,
    heads_each,
    eps,
    FORM: tl.constexpr,
    ROUND: tl.constexpr,
    AFTER: tl.constexpr,
    GROUPS: tl.constexpr,
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
    """A program's rows, ``heads_each`` of the first ``heads`` heads of y (M, N). q and k go to out (M, (Hq + Hk) * D);
    with DELTA the low-rank terms are added to y in place, v's too. With GROUPS the norm is over the width, and
    squares_ptr is what ``qkv_parts.width_squares`` gives, (M, 2, GROUPS).
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]  # no address outside its tensor
    d = tl.arange(0, BLOCK)[None, :]
    d_ok = d < HALF
    mask = row_ok & d_ok
    lane = lanes(HALF, ROT, PAIRS, BLOCK)[None, :]
    gap = lane_gap(lane, HALF, ROT, PAIRS)
    f, f_ok = features(HALF, ROT, PAIRS, BLOCK)
    read = row_ok & f_ok[None, :]
    k = tl.arange(0, K)
    if ROT > 0:
        c1, c2, s1, s2 = load_rotation(
            cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d, mask, HALF, ROT, PAIRS, ACC
        )
    if GROUPS == 0:
        wq1, wq2 = head_weights(wq_ptr, lane, gap, d_ok, FORM, ACC)
        wk1, wk2 = head_weights(wk_ptr, lane, gap, d_ok, FORM, ACC)
    else:
        rstd_q = width_rstd(squares_ptr + row64 * (2 * GROUPS), row_ok, q_heads * (2 * HALF), eps, GROUPS, ACC)
        rstd_k = width_rstd(squares_ptr + row64 * (2 * GROUPS) + GROUPS, row_ok, k_heads * (2 * HALF), eps, GROUPS, ACC)
    normed = q_heads + k_heads
    first = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * ((normed + k_heads) * (2 * HALF)) + f[None, :]
    out_at = out_ptr + row64 * (normed * (2 * HALF)) + f[None, :]
    column = tl.minimum(first, heads - 1) * (2 * HALF)
    next1, next2 = load_features(y_at + column, gap, read, PAIRS, y_ptr.dtype.element_ty)
    for step in range(heads_each):
        wanted = first + step
        live = wanted < heads
        head = tl.minimum(wanted, heads - 1)
        column = head * (2 * HALF)
        x1 = next1.to(ACC)
        x2 = next2.to(ACC)
        # The next head is asked for before this one is stored: being in place, no compiler may move it there.
        ahead = tl.minimum(wanted + 1, heads - 1) * (2 * HALF)
        more = read & (step + 1 < heads_each)
        next1, next2 = load_features(y_at + ahead, gap, more, PAIRS, y_ptr.dtype.element_ty)
        if DELTA:
            part = (head >= q_heads).to(tl.int32) + (head >= normed).to(tl.int32)
            xa_at = xa_ptr + row64 * K if JOINED else xa_ptr + row64 * (3 * K) + part * K
            xa = tl.load(xa_at + k[None, :], mask=row_ok, other=0.0).to(DOT)
            b_at = b_ptr + (column + lane).to(tl.int64) * K + k[:, None]
            b1 = tl.load(b_at, mask=d_ok & live, other=0.0).to(DOT)
            b2 = tl.load(b_at + gap * K, mask=d_ok & live, other=0.0).to(DOT)
            # What is kept is rounded, and it is what is kept that is normalised.
            x1 = (x1 + tl.dot(xa, b1, input_precision="ieee")).to(ROUND).to(ACC)
            x2 = (x2 + tl.dot(xa, b2, input_precision="ieee")).to(ROUND).to(ACC)
            store_features(y_at + column, gap, x1, x2, read & live, PAIRS)
        if AFTER:
            x1, x2 = rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED=False)
        rstd = head_rstd(x1, x2, eps, HALF, ACC) if GROUPS == 0 else tl.where(head < q_heads, rstd_q, rstd_k)
        n1 = x1 * rstd
        n2 = x2 * rstd
        if FORM == "llama":
            n1 = n1.to(ROUND).to(ACC)
            n2 = n2.to(ROUND).to(ACC)
        if GROUPS == 0:
            of_q = head < q_heads
            y1 = n1 * tl.where(of_q, wq1, wk1)
            y2 = n2 * tl.where(of_q, wq2, wk2)
        else:
            w1, w2 = width_weights(wq_ptr, wk_ptr, column, q_heads * (2 * HALF), lane, gap, d_ok, FORM, ACC)
            y1 = n1 * w1
            y2 = n2 * w2
        if ROT > 0 and not AFTER:
            y1, y2 = rotate(y1, y2, c1, c2, s1, s2, TRANSPOSED=False)
        store_features(out_at + column, gap, y1, y2, read & live & (head < normed), PAIRS)


def qkv_norm_rope_forward(
    y: Tensor, xa: Tensor | None, b: Tensor | None, rotary: Rotary, norms: HeadNorms, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """(q and k side by side (M, (Hq + Hk) * D), normalised and rotated; ``y`` (M, N) with the low-rank terms added).

    Shapes: xa (M, 3 * K or K), b (N, K), both contiguous or both None. ``y`` is written where they are given.
    """
    count = y.shape[0]
    normed = rotary.q_heads + rotary.k_heads
    stored = y.to(store_dtype(y.dtype))  # y itself, except in the interpreter
    out = torch.empty((count, normed * rotary.head_dim), dtype=stored.dtype, device=y.device)
    kind = "_few" if count <= FEW_ROWS else "" if b is None or norms.span == "width" else "_lora"
    tile = tile or tile_for(f"qkv_norm_rope_forward{kind}")
    squares: Tensor | None = None
    if norms.span == "width" and count:
        squares = width_squares(stored, xa, b, rotary, y.dtype, tile)
        xa = b = None  # added
    heads = normed if b is None else normed + rotary.k_heads
    blocks = triton.cdiv(count, tile.rows)
    # Few rows: fewer heads a program, or most of the GPU would have nothing to do.
    each = min(tile.columns, max(1, heads * blocks // tile.programs))
    if count:
        with on_device_of(y):
            _forward_kernel[(blocks, triton.cdiv(heads, each))](
                stored,
                out,
                stored if xa is None else xa,
                stored if b is None else b,
                stored if norms.q is None else norms.q,
                stored if norms.k is None else norms.k,
                squares,
                *rotary.arguments(),
                count,
                rotary.seq_len,
                rotary.q_heads,
                rotary.k_heads,
                heads,
                each,
                float(norms.eps),
                FORM=norms.kernel_form,
                ROUND=triton_store_dtype(y.dtype),
                AFTER=norms.after,
                GROUPS=0 if squares is None else squares.shape[2],
                **qkv_constants(rotary, b, y.dtype, tile),
            )
    return rounded(out, y.dtype), rounded(stored, y.dtype)


def backward_tile(shared_memory: int, head_size: int, rank: int, *, width: bool = False) -> Tile:
    """The tile of the backward, as :func:`rope_backward_tile`. Heads of more than 128 spill in 32 rows of four warps:
    without adapters, and over the width, they have fewer rows, else more warps.
    """
    padded = 2 * max(16, int(triton.next_power_of_2(head_size // 2)))
    if not rank:
        return tile_for("qkv_norm_rope_backward", lambda t: padded * t.rows <= 4096)
    if width:
        return tile_for(
            "qkv_width_backward_lora",
            lambda t: (
                padded * t.rows <= 4096
                and padded * (12 * t.rows + 4 * rank if t.stages > 1 else 32 + 2 * rank) <= shared_memory
            ),
        )

    def fits(tile: Tile) -> bool:
        # At least what Triton 3.7 takes for compute capabilities 8.0 to 9.0, by `tests/ops/compile_offline.py`.
        elements = 11 * tile.rows + 4 * rank if tile.stages > 1 else 2 * tile.rows + 2 * rank
        return padded * elements <= shared_memory and (tile.rows <= 16 or padded <= 32 * tile.warps)

    return tile_for("qkv_norm_rope_backward_lora", fits)


def qkv_norm_rope_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    y: Tensor,
    b: Tensor | None,
    rotary: Rotary,
    norms: HeadNorms,
    dtype: torch.dtype,
    *,
    want_dw: bool,
    tile: Tile | None = None,
) -> HeadGrads:
    """From the gradients of q, k, v (B, heads, S, D) and y (M, N) as the forward left it. d is in ``dtype``."""
    rank = 0 if b is None else b.shape[1]
    grads, over_width = contiguous_heads(grads), norms.span == "width"
    sums = width_sums(grads, y, rotary, norms, tile) if over_width and y.shape[0] else None
    shared_memory = gpu_of(y.device).shared_memory_bytes
    tile = tile or backward_tile(shared_memory, rotary.head_dim, rank, width=over_width)
    found = qkv_backward(grads, b, rotary, dtype, tile, y=y, norms=norms, want_dw=want_dw, sums=sums)
    if not want_dw or norms.q is None or norms.k is None:
        return HeadGrads(found.d, found.dxa, None, None)
    dw_q, dw_k = column_sums(found.dw).split([norms.q.numel(), norms.k.numel()])
    return HeadGrads(found.d, found.dxa, dw_q, dw_k)


@triton.jit
def _rotate_kernel(
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
            _rotate_kernel[(triton.cdiv(count, tile.rows), triton.cdiv(heads, each))](
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


def rope_backward_tile(shared_memory: int, head_size: int, rank: int) -> Tile:
    """The backward's tile where a program can have ``shared_memory`` bytes: it grows with the adapters' padded rank."""
    # What Triton 3.7 takes for compute capabilities 8.0 to 9.0 in half precision, by `tests/ops/compile_offline.py`.
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
    tile = tile or rope_backward_tile(gpu_of(dq.device).shared_memory_bytes, rotary.head_dim, rank)
    found = qkv_backward((dq, dk, dv), b, rotary, dtype, tile)
    return found.d, found.dxa
