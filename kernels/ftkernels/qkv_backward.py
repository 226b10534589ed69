"""The backward of both epilogues of a QKV projection: their formulas are in ``ftkernels.qkv_rope`` and
``ftkernels.qkv_norm_rope``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import accumulate_dtype, on_device_of, rounded, store_dtype, triton_store_dtype
from ftkernels.qkv_parts import HeadNorms, Rotary, head_rstd, head_weights, qkv_constants
from ftkernels.rope import load_rotation, rotate, rotation_arguments
from ftkernels.tiles import Tile


class QkvGrads(NamedTuple):
    """d (M, N); dxa, its partial sums (P, M, 3 * K) in the accumulation dtype for ``ftkernels.row_sums``, or None
    without adapters; dw, partial sums (P, 2 * D) of the norms' gradients in that dtype, empty where not wanted.
    """

    d: Tensor
    dxa: Tensor | None
    dw: Tensor


@triton.jit
def _head_norm_back(
    g1, g2, x1, x2, w1, w2, eps, FORM: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Through the norm of a head x, by halves (BM, BLOCK): d, and g_h * n_h of the norm's gradient."""
    rstd = head_rstd(x1, x2, eps, HALF, ACC)
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
    # Rows and heads past the end are masked, and their addresses are those of the last one all the same. The loop's
    # software pipeline asks for heads that no iteration reaches; a stride further on may not be mapped at all.
    row64 = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK)
    k = tl.arange(0, K)
    d_ok = d[None, :] < HALF
    mask = (rows[:, None] < M) & d_ok
    dxa = tl.full((BM, K), 0.0, ACC)
    dw1 = tl.full((BM, BLOCK), 0.0, ACC)
    dw2 = tl.full((BM, BLOCK), 0.0, ACC)
    if NORMED:
        w1, w2 = head_weights(w_ptr, d[None, :], d_ok, HALF, FORM, ACC)
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
            d1, d2, gn1, gn2 = _head_norm_back(g1, g2, x1, x2, w1, w2, eps, FORM, ROUND, HALF, ACC)
            dw1 += gn1
            dw2 += gn2
        elif TURNED:
            d1, d2 = rotate(g1, g2, c1, c2, s1, s2, TRANSPOSED=True)
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
    DELTA: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
):
    """A program's rows and its share of the q, the k and the v heads; dxa_ptr is (splits, M, 3 * K), dw_ptr
    (row blocks, splits, 2, D). Without NORMED neither y, the weights nor dw are touched.
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
        rows, M, S, N, eps, c1, c2, s1, s2, True, NORMED, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW:
        tl.store(dw_at, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + HALF, tl.sum(dw2, axis=0), mask=d < HALF)
    dxa_k, dw1, dw2 = _heads_back(
        dk_ptr, dk_batch, dk_head, dk_token, y_ptr, out_ptr, b_ptr, wk_ptr, q_width, split * k_each, k_each, k_heads,
        rows, M, S, N, eps, c1, c2, s1, s2, True, NORMED, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if WANT_DW:
        tl.store(dw_at + 2 * HALF, tl.sum(dw1, axis=0), mask=d < HALF)
        tl.store(dw_at + 3 * HALF, tl.sum(dw2, axis=0), mask=d < HALF)
    dxa_v, dw1, dw2 = _heads_back(
        dv_ptr, dv_batch, dv_head, dv_token, y_ptr, out_ptr, b_ptr, wk_ptr, q_width + k_width, split * k_each, k_each,
        k_heads, rows, M, S, N, eps, c1, c2, s1, s2, False, False, FORM, ROUND, DELTA, HALF, BLOCK, K, ACC, DOT, BM,
    )  # fmt: skip
    if DELTA:
        dxa_at = dxa_ptr + (split.to(tl.int64) * M + row64) * (3 * K) + tl.arange(0, K)[None, :]
        tl.store(dxa_at, dxa_q, mask=row_ok)
        tl.store(dxa_at + K, dxa_k, mask=row_ok)
        tl.store(dxa_at + 2 * K, dxa_v, mask=row_ok)


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
) -> QkvGrads:
    """From the gradients of q, k, v (B, heads, S, D), any strides; d is in ``dtype``.

    Args:
        b: (N, K), contiguous, where there are adapters.
        y: (M, N) as the forward left it, where heads are normalised (``norms``).
    """
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in grads)
    batch, _, seq_len, head_dim = dq.shape
    count, width = batch * seq_len, (rotary.q_heads + 2 * rotary.k_heads) * head_dim
    rank = 0 if b is None else b.shape[1]
    blocks = triton.cdiv(count, tile.rows)
    # Few rows: fewer heads a program, or most of the GPU would have nothing to do.
    splits = max(triton.cdiv(rotary.q_heads, tile.columns), min(rotary.q_heads, tile.programs // max(blocks, 1)))
    acc = accumulate_dtype(dtype)
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=dq.device)
    dxa = torch.empty((1,) if b is None else (splits, count, 3 * rank), dtype=acc, device=dq.device)
    dw = torch.empty((blocks * splits if want_dw else 0, 2 * head_dim), dtype=acc, device=dq.device)
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
                out if norms is None else norms.q,
                out if norms is None else norms.k,
                dw,
                *rotation_arguments(rotary.cos, rotary.sin),
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
                FORM="llama" if norms is None else norms.form,
                ROUND=triton_store_dtype(dtype),
                **qkv_constants(rotary, b, dtype, tile),
            )
    return QkvGrads(rounded(out, dtype), None if b is None else dxa, dw)
