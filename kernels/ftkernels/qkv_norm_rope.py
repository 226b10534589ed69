"""The epilogue of a QKV projection where heads are normalised before they are rotated (Qwen3, Gemma-3), in one kernel.

Legend: M = B * S rows, Hq and Hk heads, D head size, N = (Hq + 2 Hk) * D, K padded rank. For head h of part p (q, k
or v), with the low-rank terms of adapters where there are any:

    x_h = y0_h + xa_p @ B_h.T
    n_h = x_h / sqrt(mean(x_h^2) + eps)          float32, over D
    y_h = rope(n_h * w_p)                        q and k only; forms as in ``ftkernels.rms_norm``, w + 1 for Gemma's

and backward, from dq, dk, dv with any strides, n formed again from x:

    g_h = rope.T(dy_h),   gw = g_h * w_p,   d_h = rstd * (gw - n_h * mean(gw * n_h))      d_h = dy_h for v
    dw_p = sum over rows and the heads of p of  g_h * n_h
    dxa_p = sum over the heads of p of  d_h @ B_h

dw and dxa are float32: partial sums a program, added in a fixed order afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import gpu_of, on_device_of, rounded, store_dtype, triton_store_dtype
from ftkernels.qkv_backward import qkv_backward
from ftkernels.qkv_parts import FEW_ROWS, HeadNorms, Rotary, head_rstd, head_weights, qkv_constants
from ftkernels.rope import load_rotation, rotate, rotation_arguments
from ftkernels.row_sums import column_sums
from ftkernels.tiles import Tile, tile_for


class HeadGrads(NamedTuple):
    """d (M, N); dxa, its partial sums (P, M, 3 * K) in the accumulation dtype for ``ftkernels.row_sums``; and the
    norms' gradients (D,) in that dtype. None of what is not there or was not wanted.
    """

    d: Tensor
    dxa: Tensor | None
    dw_q: Tensor | None
    dw_k: Tensor | None


@triton.jit
def _forward_kernel(
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
    wq1, wq2 = head_weights(wq_ptr, d, d_ok, HALF, FORM, ACC)
    wk1, wk2 = head_weights(wk_ptr, d, d_ok, HALF, FORM, ACC)
    normed = q_heads + k_heads
    first = tl.program_id(1) * heads_each
    y_at = y_ptr + row64 * ((normed + k_heads) * (2 * HALF)) + d
    out_at = out_ptr + row64 * (normed * (2 * HALF)) + d
    column = tl.minimum(first, heads - 1) * (2 * HALF)
    next1 = tl.load(y_at + column, mask=mask, other=0.0)
    next2 = tl.load(y_at + column + HALF, mask=mask, other=0.0)
    for step in range(heads_each):
        wanted = first + step
        live = wanted < heads
        head = tl.minimum(wanted, heads - 1)
        column = head * (2 * HALF)
        x1 = next1.to(ACC)
        x2 = next2.to(ACC)
        # The next head is asked for before this one is stored: being in place, no compiler may move it there.
        ahead = tl.minimum(wanted + 1, heads - 1) * (2 * HALF)
        more = mask & (step + 1 < heads_each)
        next1 = tl.load(y_at + ahead, mask=more, other=0.0)
        next2 = tl.load(y_at + ahead + HALF, mask=more, other=0.0)
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
        rstd = head_rstd(x1, x2, eps, HALF, ACC)
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


def qkv_norm_rope_forward(
    y: Tensor, xa: Tensor | None, b: Tensor | None, rotary: Rotary, norms: HeadNorms, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """(q and k side by side (M, (Hq + Hk) * D), normalised and rotated; ``y`` (M, N) with the low-rank terms added).

    Shapes: xa (M, 3 * K), b (N, K), both contiguous or both None. ``y`` is written where they are given.
    """
    count = y.shape[0]
    normed = rotary.q_heads + rotary.k_heads
    stored = y.to(store_dtype(y.dtype))  # y itself, except in the interpreter
    out = torch.empty((count, normed * rotary.head_dim), dtype=stored.dtype, device=y.device)
    heads = normed if b is None else normed + rotary.k_heads
    kind = "_few" if count <= FEW_ROWS else "" if b is None else "_lora"
    tile = tile or tile_for(f"qkv_norm_rope_forward{kind}")
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
                norms.q,
                norms.k,
                *rotation_arguments(rotary.cos, rotary.sin),
                count,
                rotary.cos.shape[1],
                rotary.q_heads,
                rotary.k_heads,
                heads,
                each,
                float(norms.eps),
                FORM=norms.form,
                ROUND=triton_store_dtype(y.dtype),
                **qkv_constants(rotary, b, y.dtype, tile),
            )
    return rounded(out, y.dtype), rounded(stored, y.dtype)


def backward_tile(shared_memory: int, head_size: int, rank: int) -> Tile:
    """The tile of the backward, as ``qkv_rope.backward_tile``. Heads of more than 128 spill in 32 rows of four warps:
    without adapters they have fewer rows, with adapters more warps.
    """
    padded = 2 * max(16, int(triton.next_power_of_2(head_size // 2)))
    if not rank:
        return tile_for("qkv_norm_rope_backward", lambda t: padded * t.rows <= 4096)

    def fits(tile: Tile) -> bool:
        # At least what Triton 3.7 takes for compute capabilities 8.0 to 9.0, by `kernels/bench/offline.py`.
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
    tile = tile or backward_tile(gpu_of(y.device).shared_memory_bytes, rotary.head_dim, rank)
    found = qkv_backward(grads, b, rotary, dtype, tile, y=y, norms=norms, want_dw=want_dw)
    dw_q, dw_k = column_sums(found.dw).split(rotary.head_dim) if want_dw else (None, None)
    return HeadGrads(found.d, found.dxa, dw_q, dw_k)
