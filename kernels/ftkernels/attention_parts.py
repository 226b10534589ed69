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
def softmax_of_sinks(sinks):
    """(peak, total) of an online softmax in base 2 that has seen nothing but ``sinks``; one of -inf counts nothing."""
    peak = sinks.to(tl.float32) * LOG2E
    return peak, tl.where(peak == float("-inf"), 0.0, 1.0)


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
def tile_span_around_holes(lo, hi, hole_lo, hole_hi, inside, BLOCK: tl.constexpr):
    """``tile_span`` of rows of which each sees [lo, hi) but for [hole_lo, hole_hi); they come in any order.

    Args:
        lo, hi, hole_lo, hole_hi: (ROWS,). A row without a hole has one that ends at ``lo``.
        inside: (ROWS,), False for rows that there are not.

    Returns the four of ``tile_span``, ``full_count`` being the full tiles before any hole, and then (skip, skip_count,
    more, more_count): ``skip_count`` tiles from ``skip`` on are in the holes of all rows and are not visited,
    ``more_count`` from ``more`` on are full, too, and lie after all holes.
    """
    FAR: tl.constexpr = 2147483647
    lo_first = tl.min(tl.where(inside, lo, FAR), 0)
    hi_last = tl.max(tl.where(inside, hi, 0), 0)
    first = lo_first // BLOCK
    last = tl.where(hi_last > lo_first, (hi_last + BLOCK - 1) // BLOCK, first)
    full = tl.minimum(tl.maximum((tl.max(tl.where(inside, lo, 0), 0) + BLOCK - 1) // BLOCK, first), last)
    full_end = tl.minimum(tl.maximum(tl.min(tl.where(inside, hi, FAR), 0) // BLOCK, full), last)
    # Between the first hole's begin and the last one's end no tile is full.
    has_hole = inside & (hole_hi > lo)
    before = tl.min(tl.where(has_hole, hole_lo, FAR), 0) // BLOCK
    after = (tl.max(tl.where(has_hole, hole_hi, 0), 0) + BLOCK - 1) // BLOCK
    before = tl.minimum(tl.maximum(before, full), full_end)
    more = tl.minimum(tl.maximum(after, before), full_end)
    # What all holes have in common. A row of the next document sees nothing before its own, hence neither there.
    skip = (tl.max(tl.where(inside, hole_lo, 0), 0) + BLOCK - 1) // BLOCK
    skip = tl.minimum(tl.maximum(skip, first), last)
    skip_end = tl.minimum(tl.maximum(tl.min(tl.where(inside, hole_hi, FAR), 0) // BLOCK, skip), last)
    masked_count = (last - first) - (before - full) - (skip_end - skip) - (full_end - more)
    return first, full, before - full, masked_count, skip, skip_end - skip, more, full_end - more


@triton.jit
def intervals(
    lo_ptr, hi_ptr, holes_ptr, stride, batch, row, length, ROWS: tl.constexpr, BLOCK: tl.constexpr, HOLES: tl.constexpr
):
    """Loads what rows [row, row + ROWS) see of the other side, which is visited in tiles of ``BLOCK``.

    Returns (rows, bounds, span): ``rows`` (ROWS,); ``bounds`` for ``seen_by_rows``, (lo, hi) or, with ``HOLES``, (lo,
    hi, hole_lo, hole_hi), each (ROWS,) and lo = hi = 0 past ``length``; ``span`` for ``visited_tile``, the four numbers
    of ``tile_span`` or the eight of ``tile_span_around_holes``. Without ``HOLES`` ``holes_ptr`` is not read.
    """
    lo_ptr += batch * stride
    hi_ptr += batch * stride
    if HOLES:
        rows = row + tl.arange(0, ROWS)
        inside = rows < length
        lo = tl.load(lo_ptr + rows, mask=inside, other=0)
        hi = tl.load(hi_ptr + rows, mask=inside, other=0)
        holes_ptr += 2 * batch * stride
        hole_lo = tl.load(holes_ptr + rows, mask=inside, other=0)
        hole_hi = tl.load(holes_ptr + length + rows, mask=inside, other=0)
        bounds = (lo, hi, hole_lo, hole_hi)
        span = tile_span_around_holes(lo, hi, hole_lo, hole_hi, inside, BLOCK)
    else:
        last = tl.minimum(row + ROWS, length) - 1
        span = tile_span(
            tl.load(lo_ptr + row), tl.load(lo_ptr + last), tl.load(hi_ptr + row), tl.load(hi_ptr + last), BLOCK
        )
        rows = row + tl.arange(0, ROWS)
        lo = tl.load(lo_ptr + rows, mask=rows < length, other=0)
        hi = tl.load(hi_ptr + rows, mask=rows < length, other=0)
        bounds = (lo, hi)
    return rows, bounds, span


@triton.jit
def tile_count(span, MASKED: tl.constexpr, HOLES: tl.constexpr):
    """How many tiles of a span need a mask, or are full."""
    if MASKED:
        count = span[3]
    elif HOLES:
        count = span[2] + span[7]
    else:
        count = span[2]
    return count


@triton.jit
def visited_tile(i, span, MASKED: tl.constexpr, HOLES: tl.constexpr):
    """The ``i``-th of the tiles of a span that need a mask, which lie around the full ones, or of the full ones."""
    if MASKED:
        index = span[0] + i
        index = tl.where(index >= span[1], index + span[2], index)
        if HOLES:
            index = tl.where(index >= span[4], index + span[5], index)
            index = tl.where(index >= span[6], index + span[7], index)
    else:
        index = span[1] + i
        if HOLES:
            index = tl.where(i >= span[2], span[6] + (i - span[2]), index)
    return index


@triton.jit
def seen_by_rows(others, bounds, HOLES: tl.constexpr):
    """(ROWS, BLOCK): whether a row sees each of the ``others`` (BLOCK,)."""
    lo, hi = bounds[0][:, None], bounds[1][:, None]
    seen = (others[None, :] >= lo) & (others[None, :] < hi)
    if HOLES:
        seen = seen & ((others[None, :] < bounds[2][:, None]) | (others[None, :] >= bounds[3][:, None]))
    return seen


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
