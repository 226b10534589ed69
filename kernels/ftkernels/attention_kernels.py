"""The kernels of attention and their launches: forward, with output and log-sum-exp, and backward.

Legend: B batch, Hq query heads, Hkv key heads, Sq queries, Sk keys, D head size.

    s = scale * q @ k.T;  s = softcap * tanh(s / softcap) if softcap;  s = -inf where masked
    lse = log(exp(sink) + sum_k exp(s));  out = exp(s - lse) @ v            without a sink the first term is not there

A program owns one tile of queries of one head and walks over the tiles of keys that it sees. Capping comes before
masking: a masked score that were capped afterwards would be -softcap, not -inf. A sink is what the online softmax
starts from: the score of a key without a value.

A cap bounds every score, so exp(s) can neither overflow nor vanish in float32 and the running maximum, with its
rescaling of the accumulator, is left out (``FIXED_MAX``). float16 probabilities would overflow, and a sink has no
bound; there it stays.

Backward of attention without atomics: every output tile has one owner, so two runs give the same bits.

With s, p of the forward, t = tanh(scale * q @ k.T / softcap), dP = dO @ v.T (kernels/attention.md derives it):

    delta = sum_d(dO * O)                 one number a query; equals sum_k p * dP
    ds = p * (dP - delta) * (1 - t^2)     the last factor only with softcap
    dq = scale * ds @ k,    dk = scale * ds.T @ q,    dv = p.T @ dO
    dsink = -sum over rows of exp(sink - lse) * delta

A sink is part of lse and of nothing else that the kernels read, so they need not know of it.

The query kernel owns a tile of queries and writes dq (and delta, which the others read). The key kernel owns a tile of
keys of one key head, walks over all query heads of its group, and computes the transposed scores k @ q.T directly: on
Hopper the transpose of a product would go through shared memory, and has been miscompiled. It runs once for dk and dv
together, or twice, once for each: at head size 256 two accumulators do not fit into the registers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.attention_config import (
    AttentionSettings,
    AttentionTile,
    AttentionTiles,
    common_constants,
    strides,
    tile_source,
    token_major_like,
)
from ftkernels.attention_mask import TokenRanges
from ftkernels.attention_parts import (
    LOG2E,
    bounded,
    intervals,
    load_tile,
    seen_by_rows,
    softmax_of_sinks,
    store_tile,
    tile_count,
    visited_tile,
)
from ftkernels.attention_stored import stored_backward
from ftkernels.device import on_device_of, rounded

# exp(60) * 1e6 keys * values of 1e4 is 1e36, and exp(-60) is 1e-26: both well inside float32.
_LARGEST_FIXED_CAP = 60.0


@triton.jit
def _forward_kernel(
    q_src,
    k_src,
    v_src,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    key_lo_ptr,
    key_hi_ptr,
    holes_ptr,
    ranges_stride,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    batch_heads,
    heads,
    q_len,
    k_len,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    FIXED_MAX: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HOLES: tl.constexpr,
):
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    # Under a causal mask the last queries have the most keys; they start first, so that no long program ends alone.
    pid = tl.program_id(0)
    tile = tl.cdiv(q_len, QUERIES) - 1 - pid // batch_heads
    batch = (pid % batch_heads) // heads
    head = (pid % batch_heads) % heads
    row = tile * QUERIES
    rows, bounds, span = intervals(
        key_lo_ptr, key_hi_ptr, holes_ptr, ranges_stride, batch, row, q_len, QUERIES, KEYS, HOLES
    )
    q = load_tile(
        q_src, batch, head, row, q_stride_b, q_stride_h, q_stride_s, q_len, True, D, BLOCK_D, QUERIES, CD, TMA
    )
    acc = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    if sinks_ptr is None:
        total = tl.zeros((QUERIES,), tl.float32)
        peak = tl.zeros((QUERIES,), tl.float32) if FIXED_MAX else tl.full((QUERIES,), float("-inf"), tl.float32)
    else:
        tl.static_assert(not FIXED_MAX)
        peak, total = softmax_of_sinks(tl.load(sinks_ptr + head + tl.zeros((QUERIES,), tl.int32)))
    for MASKED in tl.static_range(2):
        for i in range(tile_count(span, MASKED, HOLES)):
            col = visited_tile(i, span, MASKED, HOLES) * KEYS
            k = load_tile(
                k_src, batch, head // GROUP, col, k_stride_b, k_stride_h, k_stride_s, k_len, MASKED, D, BLOCK_D, KEYS,
                CD, TMA,
            )  # fmt: skip
            x = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP, FAST_TANH)
            if MASKED:
                x = tl.where(seen_by_rows(col + tl.arange(0, KEYS), bounds, HOLES), x, float("-inf"))
            if FIXED_MAX:
                p = tl.exp2(x * FACTOR)
            else:
                new_peak = tl.maximum(peak, tl.max(x, 1) * FACTOR)
                # A row that has seen nothing has peak -inf, and -inf - -inf is NaN.
                shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
                p = tl.exp2(x * FACTOR - shift[:, None])
                decay = tl.exp2(peak - shift)
                total *= decay
                acc *= decay[:, None]
                peak = new_peak
            total += tl.sum(p, 1)
            v = load_tile(
                v_src, batch, head // GROUP, col, v_stride_b, v_stride_h, v_stride_s, k_len, MASKED, D, BLOCK_D, KEYS,
                CD, TMA,
            )  # fmt: skip
            acc = tl.dot(p.to(CD), v, acc, input_precision=PRECISION)
    seen = total > 0.0
    acc *= tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
    lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    store_tile(out_ptr, acc, batch, head, row, o_stride_b, o_stride_h, o_stride_s, q_len, D, BLOCK_D, QUERIES)
    at = lse_ptr + (batch * heads + head).to(tl.int64) * q_len + rows
    tl.store(at, lse, mask=rows < q_len)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: TokenRanges,
    settings: AttentionSettings,
    tile: AttentionTile,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) without autograd: out (B, Hq, Sq, D), a view of a contiguous (B, Sq, Hq, D) in q's dtype; lse
    (B, Hq, Sq) float32 in base 2, of a query that sees nothing -inf or the sink. ``sinks``: (Hq,), contiguous.
    """
    batch, heads, q_len, _ = q.shape
    out = token_major_like(q)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
    fixed = 0.0 < settings.softcap <= _LARGEST_FIXED_CAP and q.dtype != torch.float16 and sinks is None
    if out.numel():
        with on_device_of(q):
            _forward_kernel[(triton.cdiv(q_len, tile.queries) * batch * heads,)](
                tile_source(q, tile.queries, tile.tma),
                tile_source(k, tile.keys, tile.tma),
                tile_source(v, tile.keys, tile.tma),
                sinks,
                out,
                lse,
                ranges.key_lo,
                ranges.key_hi,
                ranges.key_lo if ranges.key_holes is None else ranges.key_holes,
                0 if ranges.batch == 1 else q_len,
                *strides(q, k, v, out),
                batch * heads,
                heads,
                q_len,
                k.shape[2],
                FIXED_MAX=fixed,
                **common_constants(settings, tile, ranges),
            )
    return rounded(out, q.dtype), lse


@triton.jit
def _query_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    out_ptr,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    key_lo_ptr,
    key_hi_ptr,
    holes_ptr,
    ranges_stride,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    do_stride_b,
    do_stride_h,
    do_stride_s,
    o_stride_b,
    o_stride_h,
    o_stride_s,
    dq_stride_b,
    dq_stride_h,
    dq_stride_s,
    batch_heads,
    heads,
    q_len,
    k_len,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HOLES: tl.constexpr,
):
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    pid = tl.program_id(0)
    tile = tl.cdiv(q_len, QUERIES) - 1 - pid // batch_heads
    batch = (pid % batch_heads) // heads
    head = (pid % batch_heads) % heads
    row = tile * QUERIES
    rows, bounds, span = intervals(
        key_lo_ptr, key_hi_ptr, holes_ptr, ranges_stride, batch, row, q_len, QUERIES, KEYS, HOLES
    )
    q = load_tile(
        q_src, batch, head, row, q_stride_b, q_stride_h, q_stride_s, q_len, True, D, BLOCK_D, QUERIES, CD, TMA
    )
    do = load_tile(
        do_src, batch, head, row, do_stride_b, do_stride_h, do_stride_s, q_len, True, D, BLOCK_D, QUERIES, CD, TMA
    )
    out = load_tile(
        out_ptr, batch, head, row, o_stride_b, o_stride_h, o_stride_s, q_len, True, D, BLOCK_D, QUERIES, tl.float32,
        False,
    )  # fmt: skip
    per_query = (batch * heads + head).to(tl.int64) * q_len + rows
    delta = tl.sum(out * do.to(tl.float32), 1)
    tl.store(delta_ptr + per_query, delta, mask=rows < q_len)
    lse = tl.load(lse_ptr + per_query, mask=rows < q_len, other=0.0)
    dq = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for MASKED in tl.static_range(2):
        for i in range(tile_count(span, MASKED, HOLES)):
            col = visited_tile(i, span, MASKED, HOLES) * KEYS
            k = load_tile(
                k_src, batch, head // GROUP, col, k_stride_b, k_stride_h, k_stride_s, k_len, MASKED, D, BLOCK_D, KEYS,
                CD, TMA,
            )  # fmt: skip
            v = load_tile(
                v_src, batch, head // GROUP, col, v_stride_b, v_stride_h, v_stride_s, k_len, MASKED, D, BLOCK_D, KEYS,
                CD, TMA,
            )  # fmt: skip
            x = bounded(tl.dot(q, tl.trans(k), input_precision=PRECISION), SCALE, SOFTCAP, FAST_TANH)
            z = x * FACTOR - lse[:, None]
            if MASKED:
                z = tl.where(seen_by_rows(col + tl.arange(0, KEYS), bounds, HOLES), z, float("-inf"))
            weight = tl.exp2(z)
            if SOFTCAP != 0.0:  # before dP is there: x need not live beside it, and registers are what is short
                weight *= 1.0 - x * x
            ds = weight * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
            dq = tl.dot(ds.to(CD), k, dq, input_precision=PRECISION)
    store_tile(dq_ptr, dq * SCALE, batch, head, row, dq_stride_b, dq_stride_h, dq_stride_s, q_len, D, BLOCK_D, QUERIES)


@triton.jit
def _key_weights(
    k, q, lse, rows, bounds, MASKED: tl.constexpr, HOLES: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr, FACTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(p, x) of a tile, (KEYS, QUERIES): the softmax's weights and the bounded scores that they are made of."""
    x = bounded(tl.dot(k, tl.trans(q), input_precision=PRECISION), SCALE, SOFTCAP, FAST_TANH)
    z = x * FACTOR - lse[None, :]
    if MASKED:
        z = tl.where(seen_by_rows(rows, bounds, HOLES), z, float("-inf"))
    return tl.exp2(z), x


@triton.jit
def _key_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    dk_ptr,
    dv_ptr,
    lse_ptr,
    delta_ptr,
    query_lo_ptr,
    query_hi_ptr,
    holes_ptr,
    ranges_stride,
    q_stride_b,
    q_stride_h,
    q_stride_s,
    k_stride_b,
    k_stride_h,
    k_stride_s,
    v_stride_b,
    v_stride_h,
    v_stride_s,
    do_stride_b,
    do_stride_h,
    do_stride_s,
    dk_stride_b,
    dk_stride_h,
    dk_stride_s,
    dv_stride_b,
    dv_stride_h,
    dv_stride_s,
    batch_heads,
    heads,
    q_len,
    k_len,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CD: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    HOLES: tl.constexpr,
):
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    # Under a causal mask the first keys are seen by the most queries, and start first.
    pid = tl.program_id(0)
    batch = (pid % batch_heads) // heads
    head = (pid % batch_heads) % heads
    col = (pid // batch_heads) * KEYS
    _, bounds, span = intervals(
        query_lo_ptr, query_hi_ptr, holes_ptr, ranges_stride, batch, col, k_len, KEYS, QUERIES, HOLES
    )
    k = load_tile(k_src, batch, head, col, k_stride_b, k_stride_h, k_stride_s, k_len, True, D, BLOCK_D, KEYS, CD, TMA)
    dv = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    if WANT_DK:
        v = load_tile(
            v_src, batch, head, col, v_stride_b, v_stride_h, v_stride_s, k_len, True, D, BLOCK_D, KEYS, CD, TMA
        )
    for MASKED in tl.static_range(2):
        # One loop over (query head of the group, tile), so that loads stay in flight from one head to the next.
        count = tile_count(span, MASKED, HOLES)
        each = tl.maximum(count, 1)
        for i in range(count * GROUP):
            q_head = head * GROUP + i // each
            row = visited_tile(i % each, span, MASKED, HOLES) * QUERIES
            rows = row + tl.arange(0, QUERIES)
            per_query = (batch * heads * GROUP + q_head).to(tl.int64) * q_len + rows
            q = load_tile(
                q_src, batch, q_head, row, q_stride_b, q_stride_h, q_stride_s, q_len, MASKED, D, BLOCK_D, QUERIES, CD,
                TMA,
            )  # fmt: skip
            do = load_tile(
                do_src, batch, q_head, row, do_stride_b, do_stride_h, do_stride_s, q_len, MASKED, D, BLOCK_D, QUERIES,
                CD, TMA,
            )  # fmt: skip
            lse = tl.load(lse_ptr + per_query, mask=rows < q_len, other=0.0)
            p, x = _key_weights(k, q, lse, rows, bounds, MASKED, HOLES, SCALE, SOFTCAP, FAST_TANH, FACTOR, PRECISION)
            if WANT_DV:
                dv = tl.dot(p.to(CD), do, dv, input_precision=PRECISION)
            if WANT_DK:
                delta = tl.load(delta_ptr + per_query, mask=rows < q_len, other=0.0)
                weight = p
                if SOFTCAP != 0.0:
                    weight = p * (1.0 - x * x)
                ds = weight * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
                dk = tl.dot(ds.to(CD), q, dk, input_precision=PRECISION)
    if WANT_DV:
        store_tile(dv_ptr, dv, batch, head, col, dv_stride_b, dv_stride_h, dv_stride_s, k_len, D, BLOCK_D, KEYS)
    if WANT_DK:
        store_tile(dk_ptr, dk * SCALE, batch, head, col, dk_stride_b, dk_stride_h, dk_stride_s, k_len, D, BLOCK_D, KEYS)


def query_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    ranges: TokenRanges,
    settings: AttentionSettings,
    tile: AttentionTile,
) -> tuple[Tensor, Tensor]:
    """(dq, delta) from ``saved`` = (q, k, v, out, lse): dq as q, delta (B, Hq, Sq) float32."""
    q, k, v, out, lse = saved
    batch, heads, q_len, _ = q.shape
    dq = token_major_like(q)
    delta = torch.empty_like(lse)
    if dq.numel():
        with on_device_of(q):
            _query_kernel[(triton.cdiv(q_len, tile.queries) * batch * heads,)](
                tile_source(q, tile.queries, tile.tma),
                tile_source(k, tile.keys, tile.tma),
                tile_source(v, tile.keys, tile.tma),
                tile_source(d_out, tile.queries, tile.tma),
                out,
                dq,
                lse,
                delta,
                ranges.key_lo,
                ranges.key_hi,
                ranges.key_lo if ranges.key_holes is None else ranges.key_holes,
                0 if ranges.batch == 1 else q_len,
                *strides(q, k, v, d_out, out, dq),
                batch * heads,
                heads,
                q_len,
                k.shape[2],
                **common_constants(settings, tile, ranges),
            )
    return rounded(dq, q.dtype), delta


def key_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    delta: Tensor,
    ranges: TokenRanges,
    settings: AttentionSettings,
    tile: AttentionTile,
    *,
    want_dk: bool,
    want_dv: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dk, dv), None where not wanted, in one launch. ``delta`` is read for dk only."""
    q, k, v, _, lse = saved
    batch, heads, k_len, _ = k.shape
    dk = token_major_like(k) if want_dk else None
    dv = token_major_like(v) if want_dv else None
    dk_target, dv_target = k if dk is None else dk, v if dv is None else dv
    if k.numel():
        with on_device_of(q):
            _key_kernel[(triton.cdiv(k_len, tile.keys) * batch * heads,)](
                tile_source(q, tile.queries, tile.tma),
                tile_source(k, tile.keys, tile.tma),
                tile_source(v, tile.keys, tile.tma),
                tile_source(d_out, tile.queries, tile.tma),
                dk_target,
                dv_target,
                lse,
                delta,
                ranges.query_lo,
                ranges.query_hi,
                ranges.query_lo if ranges.query_holes is None else ranges.query_holes,
                0 if ranges.batch == 1 else k_len,
                *strides(q, k, v, d_out, dk_target, dv_target),
                batch * heads,
                heads,
                q.shape[2],
                k_len,
                WANT_DK=want_dk,
                WANT_DV=want_dv,
                **common_constants(settings, tile, ranges),
            )
    return None if dk is None else rounded(dk, k.dtype), None if dv is None else rounded(dv, v.dtype)


def attention_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    ranges: TokenRanges,
    settings: AttentionSettings,
    tiles: AttentionTiles,
    wanted: tuple[bool, bool, bool],
    sinks: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dq, dk, dv, dsinks), None where not ``wanted``; ``saved`` is (q, k, v, out, lse). ``sinks``: (Hq,), None where
    there are none or their gradient is not wanted.
    """
    want_dq, want_dk, want_dv = wanted
    dq = dk = dv = d_sinks = None
    if tiles.stored is not None:
        stored = stored_backward(saved, d_out, ranges, settings, tiles.stored)
        grads = (grad if want else None for grad, want in zip((stored.dq, stored.dk, stored.dv), wanted, strict=True))
        return *grads, None if sinks is None else _sinks_backward(sinks, saved[4], stored.delta)  # type: ignore[return-value]
    delta = saved[4]  # read by nobody until dk or the sinks want it
    if want_dq or want_dk or sinks is not None:
        dq, delta = query_backward(saved, d_out, ranges, settings, tiles.d_query)
    if sinks is not None:
        d_sinks = _sinks_backward(sinks, saved[4], delta)
    if want_dk and want_dv and tiles.d_key_value is not None:
        dk, dv = key_backward(saved, d_out, delta, ranges, settings, tiles.d_key_value, want_dk=True, want_dv=True)
        return dq if want_dq else None, dk, dv, d_sinks
    if want_dv:
        _, dv = key_backward(saved, d_out, delta, ranges, settings, tiles.d_value, want_dk=False, want_dv=True)
    if want_dk:
        dk, _ = key_backward(saved, d_out, delta, ranges, settings, tiles.d_key, want_dk=True, want_dv=False)
    return dq if want_dq else None, dk, dv, d_sinks


def _sinks_backward(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """(Hq,) in the sinks' dtype, from lse (in base 2) and delta (B, Hq, Sq): one number a query, added in float32."""
    sink = (sinks.float() * math.log2(math.e))[:, None]
    share = torch.exp2(sink - lse).masked_fill(sink == -math.inf, 0.0)  # where lse is -inf as well, it is NaN
    return -(share * delta).sum((0, 2)).to(sinks.dtype)
