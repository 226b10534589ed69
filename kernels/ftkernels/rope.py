"""Rotary position embedding of queries and keys.

Legend: B batch, S sequence, D head size, R <= D rotated features (the first R of a head; the rest pass through).
With x1, x2 the two halves of the R features, and c1, c2, s1, s2 the halves of cos and sin at the token's position:

    y1 = x1 * c1 - x2 * s1
    y2 = x2 * c2 + x1 * s2

That is the layout "halves". In "pairs" x1 are the even and x2 the odd ones of the R features, as GLM-4, Ernie-4.5 and
Cohere-2 have it; y1 and y2 go back to the places of x1 and x2, and both are turned by c1 and s1.

The rotation's transpose is its backward (the same with -sin when the halves of cos and sin are equal, as they usually
are):

    dx1 = dy1 * c1 + dy2 * s2
    dx2 = dy2 * c2 - dy1 * s1

cos and sin are given per token, so positions are whatever the caller's position ids say: packed documents need
nothing here. The arithmetic is float32 with one rounding at the end.

In the kernels HALF = D / 2 lanes of a head, ROT = R / 2 lanes that are rotated; BLOCK is HALF
padded to a power of two. A lane is two features, those that are turned together or any two of the rest:

    halves    lane d < ROT: d and d + ROT      the others: d + ROT and d + HALF
    pairs     2 d and 2 d + 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendName,
    accumulate_dtype,
    choose_backend,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
)
from ftkernels.limits import RopeLayout


def apply_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    layout: RopeLayout = "halves",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate ``q`` and ``k``; out of place, each result with the memory order of its input.

    Args:
        q: (B, Hq, S, D), any strides with a contiguous last dimension, such as a transposed view of (B, S, Hq * D).
        k: (B, Hk, S, D), likewise; Hk may differ from Hq.
        cos: (B, S, R) or (1, S, R) with R even and at most D, as transformers' rotary embedding gives them.
        sin: as ``cos``.
        layout: the features that are turned together. "pairs" reads the first half of cos and sin only.

    Raises:
        ValueError: shapes that do not fit, or an unknown layout.
    """
    _check(q, k, cos, sin, layout)
    if not choose_backend(q.device, backend).is_triton:
        return apply_rope_reference(q, k, cos, sin, layout=layout)
    return _Rope.apply(q, k, cos, sin, layout == "pairs")


def apply_rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, layout: RopeLayout = "halves"
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, differentiable; float32 inside (float64 for float64)."""
    turn = _rotate_pairs if layout == "pairs" else _rotate_halves
    return _rotate_reference(q, cos, sin, turn), _rotate_reference(k, cos, sin, turn)


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, turn: Callable[..., Tensor]) -> Tensor:
    rotated = cos.shape[-1]
    acc = accumulate_dtype(x.dtype)
    y = turn(x[..., :rotated].to(acc), cos[:, None].to(acc), sin[:, None].to(acc)).to(x.dtype)
    return y if rotated == x.shape[-1] else torch.cat((y, x[..., rotated:]), dim=-1)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., 0::2], x[..., 1::2]
    c, s = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    return torch.stack((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).flatten(-2)


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    x_base,
    y_base,
    x_head,
    y_head,
    heads,
    c1,
    c2,
    s1,
    s2,
    HALF: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ACC: tl.constexpr,
):
    """All heads of one token: x_base and y_base are the offsets of its first head."""
    h = tl.arange(0, HEADS)[:, None]
    d, d_ok = features(HALF, HALF, PAIRS, BLOCK)
    d = d[None, :]
    mask = (h < heads) & d_ok[None, :]
    x_at = x_base + h.to(tl.int64) * x_head + d
    y_at = y_base + h.to(tl.int64) * y_head + d
    x1, x2 = load_features(x_ptr + x_at, HALF, mask, PAIRS, ACC)
    y1, y2 = rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED)
    store_features(y_ptr + y_at, HALF, y1, y2, mask, PAIRS)
    if TAIL > 0:
        t = 2 * HALF + tl.arange(0, TAIL)[None, :]
        tail = (h < heads) & (t < D)
        x = tl.load(x_ptr + x_base + h.to(tl.int64) * x_head + t, mask=tail, other=0.0).to(ACC)
        tl.store(y_ptr + y_base + h.to(tl.int64) * y_head + t, x.to(y_ptr.dtype.element_ty), mask=tail)


@triton.jit
def _rope_kernel(
    q_ptr,
    q_batch,
    q_head,
    q_token,
    oq_ptr,
    oq_batch,
    oq_head,
    oq_token,
    q_heads,
    k_ptr,
    k_batch,
    k_head,
    k_token,
    ok_ptr,
    ok_batch,
    ok_head,
    ok_token,
    k_heads,
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    S,
    HALF: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program a token: its cos and sin are read once for all heads of q and k."""
    token = tl.program_id(0).to(tl.int64)
    b = token // S
    s = token % S
    d = tl.arange(0, BLOCK)[None, :]
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, token, S, d, d < HALF, HALF, HALF, PAIRS, ACC
    )
    q_at = b * q_batch + s * q_token
    oq_at = b * oq_batch + s * oq_token
    k_at = b * k_batch + s * k_token
    ok_at = b * ok_batch + s * ok_token
    _rotate_heads(
        q_ptr, oq_ptr, q_at, oq_at, q_head, oq_head, q_heads, c1, c2, s1, s2,
        HALF, D, PAIRS, TRANSPOSED, Q_HEADS, BLOCK, TAIL, ACC,
    )  # fmt: skip
    _rotate_heads(
        k_ptr, ok_ptr, k_at, ok_at, k_head, ok_head, k_heads, c1, c2, s1, s2,
        HALF, D, PAIRS, TRANSPOSED, K_HEADS, BLOCK, TAIL, ACC,
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, transposed: bool, pairs: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate (or rotate back) into new tensors."""
    q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
    out_q, out_k = _empty_like(q), _empty_like(k)
    batch, q_heads, seq_len, head = q.shape
    half = cos.shape[-1] // 2
    tail = head - 2 * half
    if batch * seq_len:
        with on_device_of(q):
            _rope_kernel[(batch * seq_len,)](
                q,
                *q.stride()[:3],
                out_q,
                *out_q.stride()[:3],
                q_heads,
                k,
                *k.stride()[:3],
                out_k,
                *out_k.stride()[:3],
                k.shape[1],
                *rotation_arguments(cos, sin),
                seq_len,
                HALF=half,
                D=head,
                PAIRS=pairs,
                TRANSPOSED=transposed,
                Q_HEADS=triton.next_power_of_2(max(q_heads, 1)),
                K_HEADS=triton.next_power_of_2(max(k.shape[1], 1)),
                BLOCK=triton.next_power_of_2(half),
                TAIL=triton.next_power_of_2(tail) if tail else 0,
                ACC=triton_dtype(q.dtype),
                num_warps=4,
            )
    return rounded(out_q, q.dtype), rounded(out_k, k.dtype)


def _empty_like(x: Tensor) -> Tensor:
    """An output in ``x``'s memory order; contiguous where that order does not keep heads together (expanded inputs)."""
    out = torch.empty_like(x, dtype=store_dtype(x.dtype))
    return out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=out.dtype, device=x.device)


class _Rope(torch.autograd.Function):
    """Saves cos and sin only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _launch(q, k, cos, sin, transposed=False, pairs=pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return *_launch(dq, dk, cos, sin, transposed=True, pairs=ctx.pairs), None, None, None


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    if layout not in get_args(RopeLayout):
        raise ValueError(f"layout must be 'halves' or 'pairs', got {layout!r}")
    if q.dim() != 4 or k.dim() != 4 or q.shape[0] != k.shape[0] or q.shape[2:] != k.shape[2:]:
        raise ValueError(f"expected q (B, Hq, S, D) and k (B, Hk, S, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[2]:
        shapes = f"{tuple(cos.shape)}, {tuple(sin.shape)}"
        raise ValueError(f"expected cos and sin (B or 1, S, R) for q {tuple(q.shape)}, got {shapes}")
    if cos.shape[-1] % 2 or not 0 < cos.shape[-1] <= q.shape[-1]:
        raise ValueError(f"cos has {cos.shape[-1]} features: expected an even number up to the head size {q.shape[-1]}")


@triton.jit
def lanes(HALF: tl.constexpr, ROT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,): the first feature of each lane."""
    d = tl.arange(0, BLOCK)
    if PAIRS:
        first = 2 * d
    elif ROT == 0 or ROT == HALF:
        first = d
    else:
        first = tl.where(d < ROT, d, d + ROT)
    return first


@triton.jit
def lane_gap(first, HALF: tl.constexpr, ROT: tl.constexpr, PAIRS: tl.constexpr):
    """The distance from the first to the second feature of each lane: one number where it is the same in all."""
    same: tl.constexpr = PAIRS or ROT == 0 or ROT == HALF
    return (1 if PAIRS else HALF) if same else tl.where(first < ROT, ROT, HALF - ROT)


@triton.jit
def features(HALF: tl.constexpr, ROT: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """The features that ``load_features`` is pointed at, and which of them are some head's: the first one of each lane;
    (2 * BLOCK,), all of them, in pairs.
    """
    if PAIRS:
        found = tl.arange(0, 2 * BLOCK)
        ok = found < 2 * HALF
    else:
        found = lanes(HALF, ROT, PAIRS, BLOCK)
        ok = tl.arange(0, BLOCK) < HALF
    return found, ok


@triton.jit
def load_features(at, gap, mask, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """Both features of each lane, (rows, BLOCK), from ``at``. Pairs are read in one piece and parted in registers."""
    if PAIRS:
        both = tl.load(at, mask=mask, other=0.0).to(DTYPE)
        x1, x2 = tl.split(tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2)))
    else:
        x1 = tl.load(at, mask=mask, other=0.0).to(DTYPE)
        x2 = tl.load(at + gap, mask=mask, other=0.0).to(DTYPE)
    return x1, x2


@triton.jit
def store_features(at, gap, y1, y2, mask, PAIRS: tl.constexpr):
    """The reverse of ``load_features``."""
    if PAIRS:
        both = tl.reshape(tl.join(y1, y2), (y1.shape[0], 2 * y1.shape[1]))
        tl.store(at, both.to(at.dtype.element_ty), mask=mask)
    else:
        tl.store(at, y1.to(at.dtype.element_ty), mask=mask)
        tl.store(at + gap, y2.to(at.dtype.element_ty), mask=mask)


@triton.jit
def load_rotation(
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    row,
    S,
    d,
    mask,
    HALF: tl.constexpr,
    ROT: tl.constexpr,
    PAIRS: tl.constexpr,
    ACC: tl.constexpr,
):
    """cos and sin (c1, c2, s1, s2) of both features of the lanes ``d``, for ``row`` of B * S; 1 and 0 past ROT. In
    pairs both features have those of the first halves.
    """
    rest: tl.constexpr = 0.0 if ROT == HALF else 1.0
    if ROT < HALF:
        mask = mask & (d < ROT)
    c_at = cos_ptr + (row // S) * cos_batch + (row % S) * cos_token + d
    s_at = sin_ptr + (row // S) * sin_batch + (row % S) * sin_token + d
    c1 = tl.load(c_at, mask=mask, other=rest).to(ACC)
    c2 = c1 if PAIRS else tl.load(c_at + ROT, mask=mask, other=rest).to(ACC)
    s1 = tl.load(s_at, mask=mask, other=0.0).to(ACC)
    s2 = s1 if PAIRS else tl.load(s_at + ROT, mask=mask, other=0.0).to(ACC)
    return c1, c2, s1, s2


@triton.jit
def rotate(x1, x2, c1, c2, s1, s2, TRANSPOSED: tl.constexpr):
    """The lanes turned, or turned back."""
    if TRANSPOSED:
        y1 = x1 * c1 + x2 * s2
        y2 = x2 * c2 - x1 * s1
    else:
        y1 = x1 * c1 - x2 * s1
        y2 = x2 * c2 + x1 * s2
    return y1, y2


def rotation_arguments(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | int | None, ...]:
    """Kernel arguments for cos and sin (B or 1, S, R): each with its strides by batch and token."""
    if cos is None or sin is None:
        return None, 0, 0, None, 0, 0
    # Each stride is 0 where one row of cos or sin serves the whole batch.
    cos_batch = cos.stride(0) if cos.shape[0] > 1 else 0
    sin_batch = sin.stride(0) if sin.shape[0] > 1 else 0
    return cos, cos_batch, cos.stride(1), sin, sin_batch, sin.stride(1)
