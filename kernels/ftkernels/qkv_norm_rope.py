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

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
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
from ftkernels.limits import NormForm
from ftkernels.qkv_norm_rope_kernels import backward_kernel, forward_kernel
from ftkernels.qkv_rope import FEW_ROWS, Rotary
from ftkernels.rope import rotation_arguments
from ftkernels.row_sums import column_sums
from ftkernels.tiles import Tile, tile_for


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The weights (D,) of the norms of queries and of keys, whose eps and form are one."""

    q: Tensor
    k: Tensor
    eps: float
    form: NormForm


class HeadGrads(NamedTuple):
    """d (M, N); dxa, its partial sums (P, M, 3 * K) in the accumulation dtype for ``ftkernels.row_sums``; and the
    norms' gradients (D,) in that dtype. None of what is not there or was not wanted.
    """

    d: Tensor
    dxa: Tensor | None
    dw_q: Tensor | None
    dw_k: Tensor | None


def _constants(rotary: Rotary, norms: HeadNorms, b: Tensor | None, dtype: torch.dtype, tile: Tile) -> dict[str, Any]:
    """The constexpr arguments and the launch options that both kernels take."""
    half = rotary.head_dim // 2
    return {
        "FORM": norms.form,
        "ROUND": triton_store_dtype(dtype),
        "DELTA": b is not None,
        "HALF": half,
        "BLOCK": max(16, triton.next_power_of_2(half)),
        "K": 16 if b is None else b.shape[1],
        "ACC": triton_dtype(dtype),
        "DOT": triton_store_dtype(dtype),
        "BM": tile.rows,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


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
    tile = tile or tile_for("qkv_norm_rope_forward_few" if count <= FEW_ROWS else "qkv_norm_rope_forward")
    each = min(tile.columns, heads)
    if count:
        with on_device_of(y):
            forward_kernel[(triton.cdiv(count, tile.rows), triton.cdiv(heads, each))](
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
                **_constants(rotary, norms, b, y.dtype, tile),
            )
    return rounded(out, y.dtype), rounded(stored, y.dtype)


def backward_tile(shared_memory: int, head_size: int, rank: int) -> Tile:
    """As ``qkv_rope.backward_tile``. Those with adapters have 16 rows, and the second of them no pipeline; without,
    heads of more than 128 spill in 32 rows.
    """
    padded = 2 * max(16, int(triton.next_power_of_2(head_size // 2)))
    if not rank:
        return tile_for("qkv_norm_rope_backward", lambda t: padded * t.rows <= 4096)
    return tile_for(
        "qkv_norm_rope_backward_lora",
        lambda t: padded * (176 + 4 * rank if t.stages > 1 else 32 + 2 * rank) <= shared_memory,
    )


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
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in grads)
    batch, _, seq_len, head_dim = dq.shape
    count, width = batch * seq_len, y.shape[1]
    rank = 0 if b is None else b.shape[1]
    tile = tile or backward_tile(gpu_of(dq.device).shared_memory_bytes, head_dim, rank)
    splits, blocks = triton.cdiv(rotary.q_heads, tile.columns), triton.cdiv(count, tile.rows)
    acc = accumulate_dtype(dtype)
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=dq.device)
    dxa = torch.empty((1,) if b is None else (splits, count, 3 * rank), dtype=acc, device=dq.device)
    dw = torch.empty((blocks * splits if want_dw else 0, 2 * head_dim), dtype=acc, device=dq.device)
    if count:
        with on_device_of(dq):
            backward_kernel[(blocks, splits)](
                dq,
                *dq.stride()[:3],
                dk,
                *dk.stride()[:3],
                dv,
                *dv.stride()[:3],
                y,
                out,
                out if b is None else b,
                dxa,
                norms.q,
                norms.k,
                dw,
                *rotation_arguments(rotary.cos, rotary.sin),
                count,
                seq_len,
                rotary.q_heads,
                rotary.k_heads,
                width,
                triton.cdiv(rotary.q_heads, splits),
                triton.cdiv(rotary.k_heads, splits),
                float(norms.eps),
                WANT_DW=want_dw,
                **_constants(rotary, norms, b, dtype, tile),
            )
    dw_q, dw_k = column_sums(dw).split(head_dim) if want_dw else (None, None)
    return HeadGrads(rounded(out, dtype), None if b is None else dxa, dw_q, dw_k)
