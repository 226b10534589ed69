"""Forward of attention: one kernel, online softmax, output and log-sum-exp.

Legend: B batch, Hq query heads, Hkv key heads, Sq queries, Sk keys, D head size.

    s = scale * q @ k.T;  s = softcap * tanh(s / softcap) if softcap;  s = -inf where masked
    lse = log(exp(sink) + sum_k exp(s));  out = exp(s - lse) @ v            without a sink the first term is not there

A program owns one tile of queries of one head and walks over the tiles of keys that it sees. Capping comes before
masking: a masked score that were capped afterwards would be -softcap, not -inf. A sink is what the online softmax
starts from: the score of a key without a value.

A cap bounds every score, so exp(s) can neither overflow nor vanish in float32 and the running maximum, with its
rescaling of the accumulator, is left out (``FIXED_MAX``). float16 probabilities would overflow, and a sink has no
bound; there it stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.attention_config import AttentionTile
from ftkernels.attention_launch import AttentionSettings, common_constants, strides, tile_source, token_major_like
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
