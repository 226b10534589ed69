"""The backward of both epilogues of a QKV projection: their formulas are in ``ftkernels.qkv_norm_rope`` and
``ftkernels.qkv_norm_rope``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, accumulate_dtype, on_device_of, rounded, store_dtype, triton_store_dtype
from ftkernels.qkv_parts import HeadNorms, Rotary, group_sum, head_rstd, head_weights, qkv_constants
from ftkernels.rope import features, lane_gap, lanes, load_features, load_rotation, rotate, store_features


class QkvGrads(NamedTuple):
    """d (M, N); dxa, its partial sums (P, M, 3 * K or K) in the accumulation dtype, or None
    without adapters; dw, partial sums (P, 2 * D) of the norms' gradients in that dtype, (P, (Hq + Hk) * D) over the
    width, empty where not wanted.
    """

    d: Tensor
    dxa: Tensor | None
    dw: Tensor


@triton.jit
def _head_norm_back(
    g1, g2, x1, x2, w1, w2, rstd, mean, eps,
    FORM: tl.constexpr, ROUND: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Through the norm of a head x, by lanes (BM, BLOCK): d, and g_h * n_h of the norm's gradient. ``rstd`` and
    ``mean``, of gw * n, are given over the WIDTH.
    """
    if not WIDTH:
        rstd = head_rstd(x1, x2, eps, HALF, ACC)
    n1 = x1 * rstd
    n2 = x2 * rstd
    gw1 = g1 * w1
    gw2 = g2 * w2
    if not WIDTH:
        mean = ((tl.sum(gw1 * n1, axis=1) + tl.sum(gw2 * n2, axis=1)) / (2 * HALF))[:, None]
    d1 = rstd * (gw1 - n1 * mean)
    d2 = rstd * (gw2 - n2 * mean)
    if FORM == "llama":
        n1 = n1.to(ROUND).to(ACC)
        n2 = n2.to(ROUND).to(ACC)
    return d1, d2, g1 * n1, g2 * n2


@triton.jit
def _heads_back(
    dy_ptr,
    dy_batch,
    dy_head,
    dy_token,
    y_ptr,
    out_ptr,
    b_ptr,
    w_ptr,
    sums_at,
    dw_at,
    first_column,
    first_head,
    heads_each,
    heads,
    rows,
    M,
    S,
    N,
    eps,
    c1,
    c2,
    s1,
    s2,
    TURNED: tl.constexpr,
    NORMED: tl.constexpr,
    WANT_DW: tl.constexpr,
    FORM: tl.constexpr,
    ROUND: tl.constexpr,
    AFTER: tl.constexpr,
    GROUPS: tl.constexpr,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    ROT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """``heads_each`` heads of one of q, k, v: writes their columns of out. Returns their sums of d_h @ B_h (BM, K), and
    of g_h * n_h by row, (BM, BLOCK) for each feature of the lanes. With GROUPS the norm is over the width: sums_at is
    where rows' sums are, and g_h * n_h, summed over rows, is written to dw_at instead.
    """
    # Rows and heads past the end are masked, and their addresses are those of the last one all the same. The loop's
    # software pipeline asks for heads that no iteration reaches; a stride further on may not be mapped at all.
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    d_ok = d[None, :] < HALF
    lane = lanes(HALF, ROT, PAIRS, BLOCK)
    gap = lane_gap(lane, HALF, ROT, PAIRS)
    f, f_ok = features(HALF, ROT, PAIRS, BLOCK)
    read = (rows[:, None] < M) & f_ok[None, :]
    dxa = tl.full((BM, K), 0.0, ACC)
    dw1 = tl.full((BM, BLOCK), 0.0, ACC)
    dw2 = tl.full((BM, BLOCK), 0.0, ACC)
    WIDTH: tl.constexpr = GROUPS > 0
    rstd = 0.0
    mean = 0.0
    if NORMED and not WIDTH:
        w1, w2 = head_weights(w_ptr, lane[None, :], gap, d_ok, FORM, ACC)
    if NORMED and WIDTH:
        width = heads * (2 * HALF)
        rstd = 1.0 / tl.sqrt(group_sum(sums_at, rows[:, None] < M, GROUPS) / width + tl.cast(eps, ACC))
        mean = rstd * group_sum(sums_at + GROUPS, rows[:, None] < M, GROUPS) / width
    for step in range(heads_each):
        live = first_head + step < heads
        head = tl.minimum(first_head + step, heads - 1)
        head64 = tl.cast(head, tl.int64)
        dy_at = dy_ptr + (row64 // S) * dy_batch + head64 * dy_head + (row64 % S) * dy_token + f[None, :]
        g1, g2 = load_features(dy_at, gap, read & live, PAIRS, ACC)
        column = first_column + head * (2 * HALF)
        if NORMED:
            x_at = y_ptr + row64 * N + column + f[None, :]
            x1, x2 = load_features(x_at, gap, read & live, PAIRS, ACC)
            if AFTER:
                x1, x2 = rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED=False)
            elif ROT > 0:
                g1, g2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
            if WIDTH:
                w1, w2 = head_weights(w_ptr + head * (2 * HALF), lane[None, :], gap, d_ok, FORM, ACC)
            d1, d2, gn1, gn2 = _head_norm_back(
                g1, g2, x1, x2, w1, w2, rstd, mean, eps, FORM, ROUND, WIDTH, HALF, ACC
            )  # fmt: skip
            if AFTER:
                d1, d2 = rotate(d1, d2, c1, c2, s1, s2, TRANSPOSED=True)
            if not WIDTH:
                dw1 += gn1
                dw2 += gn2
            elif WANT_DW:
                tl.store(dw_at + column + lane, tl.sum(gn1, axis=0), mask=(d < HALF) & live)
                tl.store(dw_at + column + lane + gap, tl.sum(gn2, axis=0), mask=(d < HALF) & live)
        elif TURNED:
            d1, d2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
        else:
            d1 = g1
            d2 = g2
        out_at = out_ptr + row64 * N + column + f[None, :]
        store_features(out_at, gap, d1, d2, read & live, PAIRS)
        if DELTA:
            b_at = b_ptr + (column + lane[:, None]).to(tl.int64) * K + k[None, :]
            b_ok = (d[:, None] < HALF) & live
            b1 = tl.load(b_at, mask=b_ok, other=0.0).to(DOT)
            b2 = tl.load(b_at + lane_gap(lane[:, None], HALF, ROT, PAIRS) * K, mask=b_ok, other=0.0).to(DOT)
            dxa += tl.dot(d1.to(DOT), b1, input_precision="ieee")
            dxa += tl.dot(d2.to(DOT), b2, input_precision="ieee")
    return dxa, dw1, dw2


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
    y_ptr,
    out_ptr,
    b_ptr,
    dxa_ptr,
    wq_ptr,
    wk_ptr,
    dw_ptr,
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
    N,
    q_each,
    k_each,
    eps,
    NORMED: tl.constexpr,
    WANT_DW: tl.constexpr,
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
    """A program's rows and its share of the q, the k and the v heads; dxa_ptr is (splits, M, 3 * K), with JOINED
    (splits, M, K), dw_ptr (row blocks, splits, 2, D). Without NORMED neither y, the weights nor dw are touched. With
    GROUPS the norms are over the width: sums_ptr is what ``qkv_parts.width_sums`` gives, (M, 4, GROUPS), and dw_ptr
    (row blocks, Hq + Hk, D).
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    split = tl.program_id(1)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    lane = lanes(HALF, ROT, PAIRS, BLOCK)
    gap = lane_gap(lane, HALF, ROT, PAIRS)
    mask = row_ok & (d[None, :] < HALF)
    if ROT > 0:
        c1, c2, s1, s2 = load_rotation(
            cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d[None, :], mask,
            HALF, ROT, PAIRS, ACC,
        )  # fmt: skip
    else:
        c1, c2, s1, s2 = 1.0, 1.0, 0.0, 0.0
    q_width = q_heads * (2 * HALF)
    k_width = k_heads * (2 * HALF)
    sums_at = sums_ptr
    if GROUPS > 0:
        sums_at = sums_ptr + row64 * (4 * GROUPS)
        dw_at = dw_ptr + tl.program_id(0).to(tl.int64) * (q_width + k_width)
    else:
        dw_at = dw_ptr + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * (4 * HALF) + lane
    dxa_q, dw1, dw2 = _heads_back(
        dq_ptr, dq_batch, dq_head, dq_token, y_ptr, out_ptr, b_ptr, wq_ptr, sums_at, dw_at, 0, split * q_each, q_each,
        q_heads, rows, M, S, N, eps, c1, c2, s1, s2, True, NORMED, WANT_DW, FORM, ROUND, AFTER, GROUPS,
        DELTA, HALF, ROT, PAIRS, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW and GROUPS == 0:
        tl.store(dw_at, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + gap, tl.sum(dw2, axis=0), mask=d < HALF)
    if GROUPS > 0:
        sums_at += 2 * GROUPS
    dxa_k, dw1, dw2 = _heads_back(
        dk_ptr, dk_batch, dk_head, dk_token, y_ptr, out_ptr, b_ptr, wk_ptr, sums_at, dw_at, q_width, split * k_each,
        k_each, k_heads, rows, M, S, N, eps, c1, c2, s1, s2, True, NORMED, WANT_DW, FORM, ROUND, AFTER, GROUPS,
        DELTA, HALF, ROT, PAIRS, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW and GROUPS == 0:
        tl.store(dw_at + 2 * HALF, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + 2 * HALF + gap, tl.sum(dw2, axis=0), mask=d < HALF)
    dxa_v, dw1, dw2 = _heads_back(
        dv_ptr, dv_batch, dv_head, dv_token, y_ptr, out_ptr, b_ptr, wk_ptr, sums_at, dw_at, q_width + k_width,
        split * k_each, k_each, k_heads, rows, M, S, N, eps, c1, c2, s1, s2, False, False, WANT_DW, FORM, ROUND, AFTER,
        GROUPS, DELTA, HALF, ROT, PAIRS, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if DELTA and JOINED:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row64) * K + tl.arange(0, K)[None, :]
        tl.store(dxa_at, dxa_q + dxa_k + dxa_v, mask=row_ok)
    elif DELTA:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row64) * (3 * K) + tl.arange(0, K)[None, :]
        tl.store(dxa_at, dxa_q, mask=row_ok)
        tl.store(dxa_at + K, dxa_k, mask=row_ok)
        tl.store(dxa_at + 2 * K, dxa_v, mask=row_ok)


def contiguous_heads(grads: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, copied where their features are not neighbours."""
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in grads)
    return dq, dk, dv


def qkv_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    b: Tensor | None,
    rotary: Rotary,
    dtype: torch.dtype,
    tile: Tile,
    *,
    y: Tensor | None = None,
    norms: HeadNorms | None = None,
    want_dw: bool = False,
    sums: Tensor | None = None,
) -> QkvGrads:
    """From the gradients of q, k, v (B, heads, S, D), any strides; d is in ``dtype``.

    Args:
        b: (N, K), contiguous, where there are adapters.
        y: (M, N) as the forward left it, where heads are normalised (``norms``).
        sums: over the width, of ``qkv_parts.width_sums``.
    """
    dq, dk, dv = contiguous_heads(grads)
    batch, _, seq_len, head_dim = dq.shape
    count, width = batch * seq_len, (rotary.q_heads + 2 * rotary.k_heads) * head_dim
    rank = 0 if b is None else b.shape[1]
    blocks = triton.cdiv(count, tile.rows)
    # Few rows: fewer heads a program, or most of the GPU would have nothing to do. Programs of a single head spill.
    splits = max(triton.cdiv(rotary.q_heads, tile.columns), min(rotary.k_heads // 2, tile.programs // max(blocks, 1)))
    acc = accumulate_dtype(dtype)
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=dq.device)
    dxa = torch.empty((1,) if b is None else (splits, count, rotary.adapters * rank), dtype=acc, device=dq.device)
    over_width = norms is not None and norms.span == "width"
    normed = (blocks, (rotary.q_heads + rotary.k_heads) * head_dim)
    partial = normed if over_width else (blocks * splits, 2 * head_dim)
    dw = torch.empty(partial if want_dw else (0, partial[1]), dtype=acc, device=dq.device)
    if count:
        with on_device_of(dq):
            _backward_kernel[(blocks, splits)](
                dq,
                *dq.stride()[:3],
                dk,
                *dk.stride()[:3],
                dv,
                *dv.stride()[:3],
                out if y is None else y,
                out,
                out if b is None else b,
                dxa,
                out if norms is None or norms.q is None else norms.q,
                out if norms is None or norms.k is None else norms.k,
                dw,
                sums,
                *rotary.arguments(),
                count,
                seq_len,
                rotary.q_heads,
                rotary.k_heads,
                width,
                triton.cdiv(rotary.q_heads, splits),
                triton.cdiv(rotary.k_heads, splits),
                0.0 if norms is None else float(norms.eps),
                NORMED=norms is not None,
                WANT_DW=want_dw,
                FORM="llama" if norms is None else norms.kernel_form,
                ROUND=triton_store_dtype(dtype),
                AFTER=norms is not None and norms.after,
                GROUPS=0 if sums is None else sums.shape[2],
                **qkv_constants(rotary, b, dtype, tile),
            )
    return QkvGrads(rounded(out, dtype), None if b is None else dxa, dw)
