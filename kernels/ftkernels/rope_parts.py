"""Parts of the kernels that rotate heads: the features that are turned together, and cos and sin. Formulas:
``ftkernels.rope``.

Legend: D head size, R rotated features, HALF = D / 2 lanes of a head, ROT = R / 2 lanes that are rotated; BLOCK is HALF
padded to a power of two. A lane is two features, those that are turned together or any two of the rest:

    halves    lane d < ROT: d and d + ROT      the others: d + ROT and d + HALF
    pairs     2 d and 2 d + 1
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


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
