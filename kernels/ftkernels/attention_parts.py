"""Device functions of the attention kernels: tiles in and out of memory, loop bounds, capped scores.

Scores live in base 2: with ``z = score * log2(e)``, ``exp(score) = exp2(z)``, which is one instruction on a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tanh_exact(x):
    """tanh to float32 accuracy and without overflow: a polynomial near 0, where 1 - exp cancels, else exp(-2|x|)."""
    y = tl.minimum(x * x, 1.0)  # the polynomial's value is not used above 0.39, but must not overflow
    p = -5.70498872745e-3 * y + 2.06390887954e-2
    p = p * y - 5.37397155531e-2
    p = p * y + 1.33314422036e-1
    p = p * y - 3.33332819422e-1
    e = tl.exp(-2.0 * tl.abs(x))
    t = 2.0 / (1.0 + e) - 1.0
    return tl.where(y < 0.390625, x + x * y * p, tl.where(x < 0.0, -t, t))


@triton.jit
def tanh_approx(x):
    """tanh in one instruction, relative error below 2^-10.9: finer than a bfloat16 or float16 score."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def bounded(dot, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr):
    """q.k as it leaves the tensor core, or tanh(scale * q.k / softcap). Times the kernels' ``FACTOR`` it is z."""
    if SOFTCAP == 0.0:
        x = dot
    elif FAST_TANH:
        x = tanh_approx(dot * (SCALE / SOFTCAP))
    else:
        x = tanh_exact(dot * (SCALE / SOFTCAP))
    return x


@triton.jit
def tile_span(lo_first, lo_last, hi_first, hi_last, BLOCK: tl.constexpr):
    """Which tiles of ``BLOCK`` a tile of rows visits, from the intervals [lo, hi) of its first and its last row.

    Returns (first, full, full_count, masked_count): tiles from ``first`` on are visited; of them ``full_count`` from
    ``full`` on are visible to every row and need no mask, the ``masked_count`` others lie on both sides of those.
    """
    first = lo_first // BLOCK
    last = tl.where(hi_last > lo_first, (hi_last + BLOCK - 1) // BLOCK, first)
    full = tl.minimum(tl.maximum((lo_last + BLOCK - 1) // BLOCK, first), last)
    full_end = tl.minimum(tl.maximum(hi_first // BLOCK, full), last)
    full_count = full_end - full
    return first, full, full_count, last - first - full_count


@triton.jit
def intervals(lo_ptr, hi_ptr, stride, batch, row, length, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Loads what rows [row, row + ROWS) see of the other side, which is visited in tiles of ``BLOCK``.

    Returns (rows, lo, hi), each (ROWS,), with one interval [lo, hi) a row, empty past ``length``; and then the four
    numbers of ``tile_span``.
    """
    last = tl.minimum(row + ROWS, length) - 1
    lo_ptr += batch * stride
    hi_ptr += batch * stride
    first, full, full_count, masked_count = tile_span(
        tl.load(lo_ptr + row), tl.load(lo_ptr + last), tl.load(hi_ptr + row), tl.load(hi_ptr + last), BLOCK
    )
    rows = row + tl.arange(0, ROWS)
    lo = tl.load(lo_ptr + rows, mask=rows < length, other=0)
    hi = tl.load(hi_ptr + rows, mask=rows < length, other=0)
    return rows, lo, hi, first, full, full_count, masked_count


@triton.jit
def visited_tile(i, first, full, full_count, MASKED: tl.constexpr):
    """The ``i``-th of the tiles that need a mask, which lie on both sides of the full ones, or of the full ones."""
    index = full + i
    if MASKED:
        index = first + i
        index = tl.where(index >= full, index + full_count, index)
    return index


@triton.jit
def load_tile(
    source,
    batch,
    head,
    row,
    stride_b,
    stride_h,
    stride_s,
    length,
    CHECK_ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    CD: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows [row, row + ROWS) of one head as (ROWS, BLOCK_D) in ``CD``; zeros past ``length`` (if checked) and past D.

    ``source`` is a pointer or, with ``TMA``, a descriptor of the (B, H, S, D) tensor, which fills zeros by itself.
    """
    if TMA:
        tile = source.load([batch, head, row, 0]).reshape(ROWS, BLOCK_D)
    else:
        base = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s
        rows = tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, BLOCK_D)[None, :]
        at = base + (rows * stride_s + cols)
        if CHECK_ROWS:
            tile = tl.load(at, mask=(rows < length - row) & (cols < D), other=0.0)
        elif BLOCK_D != D:
            tile = tl.load(at, mask=cols < D, other=0.0)
        else:
            tile = tl.load(at)
    return tile.to(CD)


@triton.jit
def store_tile(
    target,
    value,
    batch,
    head,
    row,
    stride_b,
    stride_h,
    stride_s,
    length,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The counterpart of ``load_tile``: rows past ``length`` and columns past D are not written."""
    base = target + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK_D)[None, :]
    mask = (rows < length - row) & (cols < D)
    tl.store(base + (rows * stride_s + cols), value.to(target.dtype.element_ty), mask=mask)
