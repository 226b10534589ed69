"""Shared parts of a QKV projection's epilogues, forward and backward. Their formulas are in
``ftkernels.qkv_norm_rope``, the lanes of a head in ``ftkernels.rope``.

Sums over all heads of a token, for norms over the width of queries and of keys (OLMo-2, OLMo-3): a pass in front of
the epilogue's own, forward and backward.

Legend: K padded rank, p one of q and k.

    forward     x = y0 + xa @ B.T in place, q, k and v;   sum over the columns of p of  x^2
    backward    of  x^2  and of  g * w * x,  g = rope.T(dy)

A program leaves its sums, over the heads that it has read, to be added in the order of the programs by whoever reads
them (``group_sum``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, accumulate_dtype, on_device_of, tile_for, triton_dtype, triton_store_dtype
from ftkernels.limits import NormForm, NormSpan
from ftkernels.rms_norm import kernel_form
from ftkernels.rope import (
    features,
    lane_gap,
    lanes,
    load_features,
    load_rotation,
    rotate,
    rotation_arguments,
    store_features,
)

#: Up to so many rows a program of the forward takes one head.
FEW_ROWS = 256


@dataclass(frozen=True, slots=True)
class Rotary:
    """The heads of q and of k and v, and what turns them: cos and sin, (B or 1, S, R), last stride 1, or None.

    ``pairs``: the layout of the rotation (``ftkernels.rope``). D and R are even. ``joined``: q, k and v are one
    projection with one adapter, whose xa (M, K) all parts read; else xa is (M, 3 * K). dxa has the shape of xa.
    """

    cos: Tensor | None
    sin: Tensor | None
    q_heads: int
    k_heads: int
    head_dim: int
    pairs: bool = False
    joined: bool = False

    @property
    def seq_len(self) -> int:
        """S; 1 where nothing is rotated."""
        return 1 if self.cos is None else int(self.cos.shape[1])

    @property
    def adapters(self) -> int:
        """x @ A.T that there are: one for each part, or one for all."""
        return 1 if self.joined else 3

    @property
    def rotated(self) -> int:
        """R."""
        return 0 if self.cos is None else int(self.cos.shape[-1])

    def arguments(self) -> tuple[Tensor | int | None, ...]:
        """Kernel arguments for cos and sin."""
        return rotation_arguments(self.cos, self.sin)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of queries and of keys, whose eps and form are one. Both have weights or neither, (D,) each; (Hq * D,)
    and (Hk * D,) over the width. ``after``: behind the rotation.
    """

    q: Tensor | None
    k: Tensor | None
    eps: float
    form: NormForm
    span: NormSpan = "head"
    after: bool = False

    @property
    def kernel_form(self) -> str:
        """The constexpr ``FORM``."""
        return kernel_form(self.q, self.form)


def qkv_constants(rotary: Rotary, b: Tensor | None, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """The constexpr arguments and the launch options that all these kernels take. ``b``: (N, K), of adapters."""
    half = rotary.head_dim // 2
    return {
        "DELTA": b is not None,
        "JOINED": rotary.joined,
        "HALF": half,
        "ROT": rotary.rotated // 2,
        "PAIRS": rotary.pairs,
        "BLOCK": max(16, triton.next_power_of_2(half)),
        "K": 16 if b is None else b.shape[1],
        "ACC": triton_dtype(dtype),
        "DOT": triton_store_dtype(dtype),
        "BM": tile.rows,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


@triton.jit
def head_weights(w_ptr, first, gap, ok, FORM: tl.constexpr, ACC: tl.constexpr):
    """A norm's factor of both features of each lane: the weight, with Gemma's 1; 1 without a weight."""
    if FORM == "bare":
        w1 = tl.full((1, 1), 1.0, ACC)
        w2 = w1
    else:
        w1 = tl.load(w_ptr + first, mask=ok, other=0.0).to(ACC)
        w2 = tl.load(w_ptr + gap + first, mask=ok, other=0.0).to(ACC)
    if FORM == "gemma":
        w1 = 1.0 + w1
        w2 = 1.0 + w2
    return w1, w2


@triton.jit
def head_rstd(x1, x2, eps, HALF: tl.constexpr, ACC: tl.constexpr):
    """(rows, 1): of heads whose lanes past HALF are 0."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    return (1.0 / tl.sqrt(squares / (2 * HALF) + tl.cast(eps, ACC)))[:, None]


@triton.jit
def group_sum(at, ok, GROUPS: tl.constexpr):
    """(rows, 1): the sum of GROUPS numbers from ``at`` (rows, 1) on."""
    group = tl.arange(0, triton.next_power_of_2(GROUPS))[None, :]
    return tl.sum(tl.load(at + group, mask=ok & (group < GROUPS), other=0.0), axis=1)[:, None]


@triton.jit
def _squares_kernel(
    y_ptr,
    xa_ptr,
    b_ptr,
    squares_ptr,
    M,
    q_heads,
    k_heads,
    heads,
    heads_each,
    ROUND: tl.constexpr,
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
    """A program's rows, ``heads_each`` of the first ``heads`` heads of y (M, N); squares_ptr is (M, 2, groups)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]  # no address outside its tensor
    lane = lanes(HALF, 0, False, BLOCK)[None, :]  # any two halves: nothing is rotated here
    ok = lane < HALF
    k = tl.arange(0, K)
    normed = q_heads + k_heads
    squares_q = tl.full((BM, 1), 0.0, ACC)
    squares_k = tl.full((BM, 1), 0.0, ACC)
    first = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * ((normed + k_heads) * (2 * HALF)) + lane
    column = tl.minimum(first, heads - 1) * (2 * HALF)
    next1, next2 = load_features(y_at + column, HALF, row_ok & ok, False, y_ptr.dtype.element_ty)
    for step in range(heads_each):
        wanted = first + step
        live = wanted < heads
        head = tl.minimum(wanted, heads - 1)
        column = head * (2 * HALF)
        x1 = tl.where(live, next1.to(ACC), 0.0)
        x2 = tl.where(live, next2.to(ACC), 0.0)
        # The next head is asked for before this one is stored: being in place, no compiler may move it there.
        ahead = tl.minimum(wanted + 1, heads - 1) * (2 * HALF)
        more = row_ok & ok & (step + 1 < heads_each)
        next1, next2 = load_features(y_at + ahead, HALF, more, False, y_ptr.dtype.element_ty)
        if DELTA:
            part = (head >= q_heads).to(tl.int32) + (head >= normed).to(tl.int32)
            xa_at = xa_ptr + row64 * K if JOINED else xa_ptr + row64 * (3 * K) + part * K
            xa = tl.load(xa_at + k[None, :], mask=row_ok, other=0.0).to(DOT)
            b_at = b_ptr + (column + lane).to(tl.int64) * K + k[:, None]
            b1 = tl.load(b_at, mask=ok & live, other=0.0).to(DOT)
            b2 = tl.load(b_at + HALF * K, mask=ok & live, other=0.0).to(DOT)
            # What is kept is rounded, and it is what is kept that is normalised.
            x1 = (x1 + tl.dot(xa, b1, input_precision="ieee")).to(ROUND).to(ACC)
            x2 = (x2 + tl.dot(xa, b2, input_precision="ieee")).to(ROUND).to(ACC)
            store_features(y_at + column, HALF, x1, x2, row_ok & ok & live, False)
        squares = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1))[:, None]
        squares_q += tl.where(head < q_heads, squares, 0.0)
        squares_k += tl.where((head >= q_heads) & (head < normed), squares, 0.0)
    groups = tl.num_programs(1)
    at = squares_ptr + row64 * (2 * groups) + tl.program_id(1)
    tl.store(at, squares_q, mask=row_ok)
    tl.store(at + groups, squares_k, mask=row_ok)


def width_squares(
    y: Tensor, xa: Tensor | None, b: Tensor | None, rotary: Rotary, dtype: torch.dtype, tile: Tile
) -> Tensor:
    """The forward's sums, (M, 2, groups), of ``y`` (M, N), to which the low-rank terms are added in place.

    Shapes: xa (M, 3 * K or K), b (N, K), both contiguous or both None. ``dtype``: y's, which it is stored in.
    """
    count, normed = y.shape[0], rotary.q_heads + rotary.k_heads
    heads = normed if b is None else normed + rotary.k_heads
    each = min(tile.columns, heads)
    groups = triton.cdiv(heads, each)
    squares = torch.empty((count, 2, groups), dtype=accumulate_dtype(dtype), device=y.device)
    with on_device_of(y):
        _squares_kernel[(triton.cdiv(count, tile.rows), groups)](
            y,
            xa,
            b,
            squares,
            count,
            rotary.q_heads,
            rotary.k_heads,
            heads,
            each,
            ROUND=triton_store_dtype(dtype),
            **qkv_constants(rotary, b, dtype, tile),
        )
    return squares


@triton.jit
def _part_sums(
    dy_ptr,
    dy_batch,
    dy_head,
    dy_token,
    y_at,
    w_ptr,
    first_head,
    heads_each,
    heads,
    row64,
    row_ok,
    S,
    c1,
    c2,
    s1,
    s2,
    FORM: tl.constexpr,
    HALF: tl.constexpr,
    ROT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    BM: tl.constexpr,
):
    """(BM, 1) each: the sums of x^2 and of g * w * x over ``heads_each`` heads of one of q and k."""
    lane = lanes(HALF, ROT, PAIRS, BLOCK)[None, :]
    gap = lane_gap(lane, HALF, ROT, PAIRS)
    ok = tl.arange(0, BLOCK)[None, :] < HALF
    f, f_ok = features(HALF, ROT, PAIRS, BLOCK)
    squares = tl.full((BM, 1), 0.0, ACC)
    products = tl.full((BM, 1), 0.0, ACC)
    dy_row = dy_ptr + (row64 // S) * dy_batch + (row64 % S) * dy_token + f[None, :]
    for step in range(heads_each):
        live = first_head + step < heads
        head = tl.minimum(first_head + step, heads - 1)
        read = row_ok & f_ok[None, :] & live
        g1, g2 = load_features(dy_row + tl.cast(head, tl.int64) * dy_head, gap, read, PAIRS, ACC)
        x1, x2 = load_features(y_at + head * (2 * HALF) + f[None, :], gap, read, PAIRS, ACC)
        w1, w2 = head_weights(w_ptr + head * (2 * HALF), lane, gap, ok, FORM, ACC)
        if ROT > 0:
            g1, g2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
        squares += (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1))[:, None]
        products += (tl.sum(g1 * w1 * x1, axis=1) + tl.sum(g2 * w2 * x2, axis=1))[:, None]
    return squares, products


@triton.jit
def _sums_kernel(
    dq_ptr,
    dq_batch,
    dq_head,
    dq_token,
    dk_ptr,
    dk_batch,
    dk_head,
    dk_token,
    y_ptr,
    wq_ptr,
    wk_ptr,
    sums_ptr,
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
    q_each,
    k_each,
    FORM: tl.constexpr,
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
    """A program's rows and its share of the q and of the k heads; sums_ptr is (M, 4, groups)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    if ROT > 0:
        c1, c2, s1, s2 = load_rotation(
            cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d, row_ok & (d < HALF),
            HALF, ROT, PAIRS, ACC,
        )  # fmt: skip
    else:
        c1, c2, s1, s2 = 1.0, 1.0, 0.0, 0.0
    y_at = y_ptr + row64 * ((q_heads + 2 * k_heads) * (2 * HALF))
    groups = tl.num_programs(1)
    at = sums_ptr + row64 * (4 * groups) + split
    squares, products = _part_sums(
        dq_ptr, dq_batch, dq_head, dq_token, y_at, wq_ptr, split * q_each, q_each, q_heads, row64, row_ok, S,
        c1, c2, s1, s2, FORM, HALF, ROT, PAIRS, BLOCK, ACC, BM,
    )  # fmt: skip
    tl.store(at, squares, mask=row_ok)
    tl.store(at + groups, products, mask=row_ok)
    y_at += q_heads * (2 * HALF)
    squares, products = _part_sums(
        dk_ptr, dk_batch, dk_head, dk_token, y_at, wk_ptr, split * k_each, k_each, k_heads, row64, row_ok, S,
        c1, c2, s1, s2, FORM, HALF, ROT, PAIRS, BLOCK, ACC, BM,
    )  # fmt: skip
    tl.store(at + 2 * groups, squares, mask=row_ok)
    tl.store(at + 3 * groups, products, mask=row_ok)


def width_sums(
    grads: tuple[Tensor, Tensor, Tensor], y: Tensor, rotary: Rotary, norms: HeadNorms, tile: Tile | None
) -> Tensor:
    """The backward's sums, (M, 4, groups): of x^2 and of g * w * x, of q and then of k.

    ``grads`` of q, k, v (B, heads, S, D), last stride 1; y (M, N) as the forward left it.
    """
    dq, dk, _ = grads
    tile = tile or tile_for("qkv_width_sums", lambda t: t.rows * rotary.head_dim <= 4096)
    count, groups = y.shape[0], triton.cdiv(rotary.q_heads, tile.columns)
    sums = torch.empty((count, 4, groups), dtype=accumulate_dtype(y.dtype), device=y.device)
    with on_device_of(y):
        _sums_kernel[(triton.cdiv(count, tile.rows), groups)](
            dq,
            *dq.stride()[:3],
            dk,
            *dk.stride()[:3],
            y,
            y if norms.q is None else norms.q,
            y if norms.k is None else norms.k,
            sums,
            *rotary.arguments(),
            count,
            dq.shape[2],
            rotary.q_heads,
            rotary.k_heads,
            triton.cdiv(rotary.q_heads, groups),
            triton.cdiv(rotary.k_heads, groups),
            FORM=norms.kernel_form,
            **qkv_constants(rotary, None, y.dtype, tile),
        )
    return sums
