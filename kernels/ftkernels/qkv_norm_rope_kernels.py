"""The kernels of ``ftkernels.qkv_norm_rope``, which has their formulas."""

from __future__ import annotations

import triton
import triton.language as tl

from ftkernels.rope import load_rotation, rotate


@triton.jit
def _weights(w_ptr, d, d_ok, HALF: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr):
    """The halves of a norm's factor: the weight, with Gemma's 1."""
    w1 = tl.load(w_ptr + d, mask=d_ok, other=0.0).to(ACC)
    w2 = tl.load(w_ptr + HALF + d, mask=d_ok, other=0.0).to(ACC)
    if FORM == "gemma":
        w1 = 1.0 + w1
        w2 = 1.0 + w2
    return w1, w2


@triton.jit
def _rstd(x1, x2, eps, HALF: tl.constexpr, ACC: tl.constexpr):
    """(rows, 1): of heads whose lanes past HALF are 0."""
    squares = tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)
    return (1.0 / tl.sqrt(squares / (2 * HALF) + tl.cast(eps, ACC)))[:, None]


@triton.jit
def forward_kernel(
    y_ptr,
    out_ptr,
    xa_ptr,
    b_ptr,
    wq_ptr,
    wk_ptr,
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
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """A program's rows, ``heads_each`` of the first ``heads`` heads of y (M, N). q and k go to out (M, (Hq + Hk) * D);
    with DELTA the low-rank terms are added to y in place, v's too.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    row_ok = rows[:, None] < M
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]  # no address outside its tensor
    d = tl.arange(0, BLOCK)[None, :]
    d_ok = d < HALF
    mask = row_ok & d_ok
    k = tl.arange(0, K)
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, row64, S, d, mask, HALF, ACC
    )
    wq1, wq2 = _weights(wq_ptr, d, d_ok, HALF, FORM, ACC)
    wk1, wk2 = _weights(wk_ptr, d, d_ok, HALF, FORM, ACC)
    normed = q_heads + k_heads
    first = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * ((normed + k_heads) * (2 * HALF)) + d
    out_at = out_ptr + row64 * (normed * (2 * HALF)) + d
    for step in range(heads_each):
        live = first + step < heads
        head = tl.minimum(first + step, heads - 1)
        column = head * (2 * HALF)
        x1 = tl.load(y_at + column, mask=mask & live, other=0.0).to(ACC)
        x2 = tl.load(y_at + column + HALF, mask=mask & live, other=0.0).to(ACC)
        if DELTA:
            part = (head >= q_heads).to(tl.int32) + (head >= normed).to(tl.int32)
            xa = tl.load(xa_ptr + row64 * (3 * K) + part * K + k[None, :], mask=row_ok, other=0.0).to(DOT)
            b_at = b_ptr + (column + d).to(tl.int64) * K + k[:, None]
            b1 = tl.load(b_at, mask=d_ok & live, other=0.0).to(DOT)
            b2 = tl.load(b_at + HALF * K, mask=d_ok & live, other=0.0).to(DOT)
            # What is kept is rounded, and it is what is kept that is normalised.
            x1 = (x1 + tl.dot(xa, b1, input_precision="ieee")).to(ROUND).to(ACC)
            x2 = (x2 + tl.dot(xa, b2, input_precision="ieee")).to(ROUND).to(ACC)
            tl.store(y_at + column, x1.to(y_ptr.dtype.element_ty), mask=mask & live)
            tl.store(y_at + column + HALF, x2.to(y_ptr.dtype.element_ty), mask=mask & live)
        rstd = _rstd(x1, x2, eps, HALF, ACC)
        n1 = x1 * rstd
        n2 = x2 * rstd
        if FORM == "llama":
            n1 = n1.to(ROUND).to(ACC)
            n2 = n2.to(ROUND).to(ACC)
        of_q = head < q_heads
        y1, y2 = rotate(n1 * tl.where(of_q, wq1, wk1), n2 * tl.where(of_q, wq2, wk2), c1, c2, s1, s2, TRANSPOSED=False)
        written = mask & live & (head < normed)
        tl.store(out_at + column, y1.to(out_ptr.dtype.element_ty), mask=written)
        tl.store(out_at + column + HALF, y2.to(out_ptr.dtype.element_ty), mask=written)


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
    NORMED: tl.constexpr,
    FORM: tl.constexpr,
    ROUND: tl.constexpr,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """``heads_each`` heads of one of q, k, v: writes their columns of out. Returns their sums of d_h @ B_h (BM, K), and
    of g_h * n_h by row, (BM, BLOCK) for each half.
    """
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    d_ok = d[None, :] < HALF
    mask = (rows[:, None] < M) & d_ok
    dxa = tl.full((BM, K), 0.0, ACC)
    dw1 = tl.full((BM, BLOCK), 0.0, ACC)
    dw2 = tl.full((BM, BLOCK), 0.0, ACC)
    w1, w2 = _weights(w_ptr, d[None, :], d_ok, HALF, FORM, ACC)
    for step in range(heads_each):
        live = first_head + step < heads
        head = tl.minimum(first_head + step, heads - 1)
        head64 = tl.cast(head, tl.int64)
        dy_at = dy_ptr + (row64 // S) * dy_batch + head64 * dy_head + (row64 % S) * dy_token + d[None, :]
        g1 = tl.load(dy_at, mask=mask & live, other=0.0).to(ACC)
        g2 = tl.load(dy_at + HALF, mask=mask & live, other=0.0).to(ACC)
        column = first_column + head * (2 * HALF)
        if NORMED:
            x_at = y_ptr + row64 * N + column + d[None, :]
            x1 = tl.load(x_at, mask=mask & live, other=0.0).to(ACC)
            x2 = tl.load(x_at + HALF, mask=mask & live, other=0.0).to(ACC)
            g1, g2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
            rstd = _rstd(x1, x2, eps, HALF, ACC)
            n1 = x1 * rstd
            n2 = x2 * rstd
            gw1 = g1 * w1
            gw2 = g2 * w2
            mean = ((tl.sum(gw1 * n1, axis=1) + tl.sum(gw2 * n2, axis=1)) / (2 * HALF))[:, None]
            d1 = rstd * (gw1 - n1 * mean)
            d2 = rstd * (gw2 - n2 * mean)
            if FORM == "llama":
                n1 = n1.to(ROUND).to(ACC)
                n2 = n2.to(ROUND).to(ACC)
            dw1 += g1 * n1
            dw2 += g2 * n2
        else:
            d1 = g1
            d2 = g2
        out_at = out_ptr + row64 * N + column + d[None, :]
        tl.store(out_at, d1.to(out_ptr.dtype.element_ty), mask=mask & live)
        tl.store(out_at + HALF, d2.to(out_ptr.dtype.element_ty), mask=mask & live)
        if DELTA:
            b_at = b_ptr + (column + d[:, None]).to(tl.int64) * K + k[None, :]
            b_ok = (d[:, None] < HALF) & live
            b1 = tl.load(b_at, mask=b_ok, other=0.0).to(DOT)
            b2 = tl.load(b_at + HALF * K, mask=b_ok, other=0.0).to(DOT)
            dxa += tl.dot(d1.to(DOT), b1, input_precision="ieee")
            dxa += tl.dot(d2.to(DOT), b2, input_precision="ieee")
    return dxa, dw1, dw2


@triton.jit
def backward_kernel(
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
    WANT_DW: tl.constexpr,
    FORM: tl.constexpr,
    ROUND: tl.constexpr,
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """A program's rows and its share of the q, the k and the v heads; dxa_ptr is (splits, M, 3 * K), dw_ptr
    (row blocks, splits, 2, D).
    """
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
    dw_at = dw_ptr + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * (4 * HALF) + d
    dxa_q, dw1, dw2 = _heads_back(
        dq_ptr, dq_batch, dq_head, dq_token, y_ptr, out_ptr, b_ptr, wq_ptr, 0, split * q_each, q_each, q_heads,
        rows, M, S, N, eps, c1, c2, s1, s2, True, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW:
        tl.store(dw_at, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + HALF, tl.sum(dw2, axis=0), mask=d < HALF)
    dxa_k, dw1, dw2 = _heads_back(
        dk_ptr, dk_batch, dk_head, dk_token, y_ptr, out_ptr, b_ptr, wk_ptr, q_width, split * k_each, k_each, k_heads,
        rows, M, S, N, eps, c1, c2, s1, s2, True, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW:
        tl.store(dw_at + 2 * HALF, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + 3 * HALF, tl.sum(dw2, axis=0), mask=d < HALF)
    dxa_v, dw1, dw2 = _heads_back(
        dv_ptr, dv_batch, dv_head, dv_token, y_ptr, out_ptr, b_ptr, wk_ptr, q_width + k_width, split * k_each, k_each,
        k_heads, rows, M, S, N, eps, c1, c2, s1, s2, False, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if DELTA:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row64) * (3 * K) + tl.arange(0, K)[None, :]
        tl.store(dxa_at, dxa_q, mask=row_ok)
        tl.store(dxa_at + K, dxa_k, mask=row_ok)
        tl.store(dxa_at + 2 * K, dxa_v, mask=row_ok)
