"""Backward of attention with wide heads: weights and their gradients go through memory, some queries at a time.

The formulas are those of ``ftkernels.attention_kernels``. There each kernel computes the scores that it needs again,
since nothing of size S² is stored; with heads of 512 that is eight products in place of five, on tiles that are small
because operands of 512 columns and their accumulators fill a program. Here

    p, ds       (batch, query heads, some queries, keys): scores and dP, 512 columns added up a few at a time
    dq = scale * ds @ k,    dk = scale * ds.T @ q,    dv = p.T @ dO        each some columns of a tile a program

so that every product runs on tiles as large as those of a matrix product. Memory for p and ds is bounded: queries come
in chunks that fill it. dk and dv are added up over chunks in float32, by the program that owns the tile, so that two
runs give the same bits.

Every tile of p and ds that a product reads is written, with zeros where nothing is seen: products need no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ftkernels.attention_config import (
    AttentionSettings,
    AttentionTile,
    StoredTiles,
    common_constants,
    strides,
    token_major_like,
)
from ftkernels.attention_mask import TokenRanges
from ftkernels.attention_parts import LOG2E, bounded, intervals, load_tile, seen_by_rows
from ftkernels.device import on_device_of, rounded, store_dtype


@triton.jit
def _load(
    source, batch, head, row, col, stride_b, stride_h, stride_s, length, width,
    ROWS: tl.constexpr, COLS: tl.constexpr, CD: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``load_tile`` of some columns: (ROWS, COLS) from (row, col) on, zeros past ``length`` and ``width``."""
    if TMA:
        tile = source.load([batch, head, row, col]).reshape(ROWS, COLS)
    else:
        base = source + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s + col
        rows = tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, COLS)[None, :]
        tile = tl.load(base + (rows * stride_s + cols), mask=(rows < length - row) & (cols < width - col), other=0.0)
    return tile.to(CD)


@triton.jit
def _store(
    target, value, batch, head, row, col, stride_b, stride_h, stride_s, length, width,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    base = target + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s + col
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    mask = (rows < length - row) & (cols < width - col)
    tl.store(base + (rows * stride_s + cols), value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _delta_kernel(
    do_ptr, out_ptr, delta_ptr, do_stride_b, do_stride_h, do_stride_s, o_stride_b, o_stride_h, o_stride_s, heads, q_len,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS
    do = load_tile(
        do_ptr, batch, head, row, do_stride_b, do_stride_h, do_stride_s, q_len, True, D, BLOCK_D, ROWS, tl.float32,
        False,
    )  # fmt: skip
    out = load_tile(
        out_ptr, batch, head, row, o_stride_b, o_stride_h, o_stride_s, q_len, True, D, BLOCK_D, ROWS, tl.float32, False
    )
    rows = row + tl.arange(0, ROWS)
    at = (batch * heads + head).to(tl.int64) * q_len + rows
    tl.store(delta_ptr + at, tl.sum(out * do, 1), mask=rows < q_len)


@triton.jit
def _visits(span, index, HOLES: tl.constexpr):
    """True if the tile lies between the first and the last that a span visits."""
    count = span[2] + span[3]
    if HOLES:
        count += span[5] + span[7]
    return (index >= span[0]) & (index < span[0] + count)


@triton.jit
def _weights_kernel(
    q_src, k_src, v_src, do_src, p_ptr, ds_ptr, lse_ptr, delta_ptr, key_lo_ptr, key_hi_ptr, key_holes_ptr,
    query_lo_ptr, query_hi_ptr, query_holes_ptr, key_ranges_stride, query_ranges_stride,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s, v_stride_b, v_stride_h, v_stride_s,
    do_stride_b, do_stride_h, do_stride_s, w_stride_b, w_stride_h, w_stride_s,
    begin, heads, q_len, k_len, w_rows, w_cols,
    GROUP: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DEPTH: tl.constexpr, CD: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """One tile of p and ds, of the queries from ``begin`` on."""
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    tiles = tl.cdiv(k_len, KEYS)
    row, col = begin + (tl.program_id(0) // tiles) * QUERIES, (tl.program_id(0) % tiles) * KEYS
    rows, bounds, by_queries = intervals(
        key_lo_ptr, key_hi_ptr, key_holes_ptr, key_ranges_stride, batch, row, q_len, QUERIES, KEYS, HOLES
    )
    seen_at_all = _visits(by_queries, col // KEYS, HOLES)
    visited = seen_at_all
    if HOLES:  # keys of which queries on both sides of this tile see some; without holes both sides visit the same
        _, _, by_keys = intervals(
            query_lo_ptr, query_hi_ptr, query_holes_ptr, query_ranges_stride, batch, col, k_len, KEYS, QUERIES, HOLES
        )
        visited = visited | _visits(by_keys, row // QUERIES, HOLES)
    if visited:
        score = tl.zeros((QUERIES, KEYS), tl.float32)
        d_p = tl.zeros((QUERIES, KEYS), tl.float32)
        for depth in range(0, tl.where(seen_at_all, BLOCK_D, 0), DEPTH):
            q = _load(
                q_src, batch, head, row, depth, q_stride_b, q_stride_h, q_stride_s, q_len, D, QUERIES, DEPTH, CD, TMA
            )
            k = _load(
                k_src, batch, head // GROUP, col, depth, k_stride_b, k_stride_h, k_stride_s, k_len, D, KEYS, DEPTH, CD,
                TMA,
            )  # fmt: skip
            score = tl.dot(q, tl.trans(k), score, input_precision=PRECISION)
            do = _load(
                do_src, batch, head, row, depth, do_stride_b, do_stride_h, do_stride_s, q_len, D, QUERIES, DEPTH, CD,
                TMA,
            )  # fmt: skip
            v = _load(
                v_src, batch, head // GROUP, col, depth, v_stride_b, v_stride_h, v_stride_s, k_len, D, KEYS, DEPTH, CD,
                TMA,
            )  # fmt: skip
            d_p = tl.dot(do, tl.trans(v), d_p, input_precision=PRECISION)
        per_query = (batch * heads + head).to(tl.int64) * q_len + rows
        lse = tl.load(lse_ptr + per_query, mask=rows < q_len, other=0.0)
        delta = tl.load(delta_ptr + per_query, mask=rows < q_len, other=0.0)
        x = bounded(score, SCALE, SOFTCAP, FAST_TANH)
        seen = seen_by_rows(col + tl.arange(0, KEYS), bounds, HOLES)
        p = tl.exp2(tl.where(seen, x * FACTOR - lse[:, None], float("-inf")))
        ds = p * (d_p - delta[:, None])
        if SOFTCAP != 0.0:
            ds *= 1.0 - x * x
        _store(
            p_ptr, p, batch, head, row - begin, col, w_stride_b, w_stride_h, w_stride_s, w_rows, w_cols, QUERIES, KEYS
        )
        _store(
            ds_ptr, ds, batch, head, row - begin, col, w_stride_b, w_stride_h, w_stride_s, w_rows, w_cols, QUERIES, KEYS
        )


@triton.jit
def _query_product_kernel(
    ds_src, k_src, dq_ptr, key_lo_ptr, key_hi_ptr, holes_ptr, ranges_stride, w_stride_b, w_stride_h, w_stride_s,
    k_stride_b, k_stride_h, k_stride_s, dq_stride_b, dq_stride_h, dq_stride_s, begin, heads, q_len, k_len, w_rows,
    w_cols, tiles,
    GROUP: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, CD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """``WIDTH`` columns of a tile of dq, of the queries from ``begin`` on."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    parts = tl.cdiv(D, WIDTH)
    row = begin + (tiles - 1 - tl.program_id(0) // parts) * QUERIES  # the last queries see the most keys
    part = (tl.program_id(0) % parts) * WIDTH
    _, _, span = intervals(key_lo_ptr, key_hi_ptr, holes_ptr, ranges_stride, batch, row, q_len, QUERIES, KEYS, HOLES)
    count = span[2] + span[3]
    if HOLES:
        count += span[5] + span[7]
    dq = tl.zeros((QUERIES, WIDTH), tl.float32)
    for i in range(count):
        col = (span[0] + i) * KEYS
        ds = _load(
            ds_src, batch, head, row - begin, col, w_stride_b, w_stride_h, w_stride_s, w_rows, w_cols, QUERIES, KEYS,
            CD, TMA,
        )  # fmt: skip
        k = _load(
            k_src, batch, head // GROUP, col, part, k_stride_b, k_stride_h, k_stride_s, k_len, D, KEYS, WIDTH, CD, TMA
        )
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    _store(dq_ptr, dq * SCALE, batch, head, row, part, dq_stride_b, dq_stride_h, dq_stride_s, q_len, D, QUERIES, WIDTH)


@triton.jit
def _key_product_kernel(
    w_src, y_src, sum_ptr, out_ptr, query_lo_ptr, query_hi_ptr, holes_ptr, ranges_stride,
    w_stride_b, w_stride_h, w_stride_s, y_stride_b, y_stride_h, y_stride_s, sum_stride_b, sum_stride_h, sum_stride_s,
    out_stride_b, out_stride_h, out_stride_s, begin, heads, q_len, k_len, w_rows, w_cols,
    FIRST: tl.constexpr, LAST: tl.constexpr, FACTOR: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, CD: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    """``WIDTH`` columns of a tile of ``FACTOR * w.T @ y``, y being q or dO: what a chunk of queries adds to it."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    parts = tl.cdiv(D, WIDTH)
    col, part = (tl.program_id(0) // parts) * KEYS, (tl.program_id(0) % parts) * WIDTH
    _, _, span = intervals(
        query_lo_ptr, query_hi_ptr, holes_ptr, ranges_stride, batch, col, k_len, KEYS, QUERIES, HOLES
    )
    last = span[0] + span[2] + span[3]
    if HOLES:
        last += span[5] + span[7]
    first = tl.maximum(span[0], begin // QUERIES)
    each = tl.maximum(tl.minimum(last, tl.cdiv(begin + w_rows, QUERIES)) - first, 0)
    if FIRST | LAST | (each > 0):
        if FIRST:
            total = tl.zeros((KEYS, WIDTH), tl.float32)
        else:
            total = _load(
                sum_ptr, batch, head, col, part, sum_stride_b, sum_stride_h, sum_stride_s, k_len, D, KEYS, WIDTH,
                tl.float32, False,
            )  # fmt: skip
        for i in range(each * GROUP):
            q_head = head * GROUP + i // tl.maximum(each, 1)
            row = (first + i % tl.maximum(each, 1)) * QUERIES
            w = _load(
                w_src, batch, q_head, row - begin, col, w_stride_b, w_stride_h, w_stride_s, w_rows, w_cols, QUERIES,
                KEYS, CD, TMA,
            )  # fmt: skip
            y = _load(
                y_src, batch, q_head, row, part, y_stride_b, y_stride_h, y_stride_s, q_len, D, QUERIES, WIDTH, CD, TMA
            )
            total = tl.dot(tl.trans(w), y, total, input_precision=PRECISION)
        if LAST:
            _store(
                out_ptr, total * FACTOR, batch, head, col, part, out_stride_b, out_stride_h, out_stride_s, k_len, D,
                KEYS, WIDTH,
            )  # fmt: skip
        else:
            _store(
                sum_ptr, total, batch, head, col, part, sum_stride_b, sum_stride_h, sum_stride_s, k_len, D, KEYS, WIDTH
            )


@dataclass(frozen=True, slots=True)
class StoredGradients:
    """dq, dk and dv, laid out as q, k and v, and delta (B, Hq, Sq) float32."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    delta: Tensor


def chunk_rows(q: Tensor, k_len: int, tiles: StoredTiles) -> int:
    """Queries of each head of a chunk: whole tiles, at least one, as many as ``tiles.workspace`` bytes hold."""
    batch, heads, q_len, _ = q.shape
    step = tiles.weights.queries
    width = triton.cdiv(k_len, tiles.weights.keys) * tiles.weights.keys
    row = 2 * batch * heads * width * store_dtype(q.dtype).itemsize
    return int(min(max(tiles.workspace // row // step, 1), triton.cdiv(q_len, step)) * step)


def stored_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    d_out: Tensor,
    ranges: TokenRanges,
    settings: AttentionSettings,
    tiles: StoredTiles,
) -> StoredGradients:
    """All gradients from ``saved`` = (q, k, v, out, lse)."""
    q, k, v, out, lse = saved
    batch, heads, q_len, _ = q.shape
    made = StoredGradients(token_major_like(q), token_major_like(k), token_major_like(v), torch.empty_like(lse))
    if not q.numel() or not k.numel():
        return StoredGradients(made.dq.zero_(), made.dk.zero_(), made.dv.zero_(), made.delta.zero_())
    rows, keys = chunk_rows(q, k.shape[2], tiles), tiles.weights.keys
    weights = q.new_empty((2, batch, heads, rows, triton.cdiv(k.shape[2], keys) * keys), dtype=store_dtype(q.dtype))
    several = rows < q_len
    sums = [torch.empty(x.shape, dtype=torch.float32, device=x.device) if several else x for x in (k, v)]
    launch = _Launch(ranges, settings, tiles, k.shape[1], q_len, k.shape[2])
    with on_device_of(q):
        _delta_kernel[(triton.cdiv(q_len, 16), batch * heads)](
            d_out, out, made.delta, *strides(d_out, out), heads, q_len, D=settings.head_size,
            BLOCK_D=common_constants(settings, tiles.weights, ranges)["BLOCK_D"], ROWS=16, num_warps=4,
        )  # fmt: skip
        for begin in range(0, q_len, rows):
            p, ds = weights[0], weights[1]
            launch.weights(begin, q, k, v, d_out, p, ds, lse, made.delta)
            launch.query_product(begin, ds, k, made.dq)
            whole = {"FIRST": begin == 0, "LAST": begin + rows >= q_len}
            launch.key_product(begin, ds, q, sums[0], made.dk, FACTOR=settings.scale, **whole)
            launch.key_product(begin, p, d_out, sums[1], made.dv, FACTOR=1.0, **whole)
    dq, dk, dv = rounded(made.dq, q.dtype), rounded(made.dk, k.dtype), rounded(made.dv, v.dtype)
    return StoredGradients(dq, dk, dv, made.delta)


@dataclass(frozen=True, slots=True)
class _Launch:
    """What the launches of all chunks share."""

    ranges: TokenRanges
    settings: AttentionSettings
    tiles: StoredTiles
    key_heads: int
    q_len: int
    k_len: int

    def _constants(self, tile: AttentionTile, *unused: str) -> dict[str, Any]:
        constants = common_constants(self.settings, tile, self.ranges)
        return {name: value for name, value in constants.items() if name not in unused}

    def _by(self, side: str) -> tuple[Tensor, Tensor, Tensor, int]:
        """Begins, ends and holes of what each query (``key``) or key (``query``) sees, and the stride of a batch."""
        lo, hi, holes = (getattr(self.ranges, f"{side}_{name}") for name in ("lo", "hi", "holes"))
        return lo, hi, lo if holes is None else holes, 0 if self.ranges.batch == 1 else int(lo.shape[1])

    def weights(
        self, begin: int, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, p: Tensor, ds: Tensor, lse: Tensor,
        delta: Tensor,
    ) -> None:  # fmt: skip
        """Fills p and ds with the queries from ``begin`` on."""
        tile, depth = self.tiles.weights, self.tiles.depth
        by_queries, by_keys = self._by("key"), self._by("query")
        count = triton.cdiv(min(p.shape[2], self.q_len - begin), tile.queries)
        _weights_kernel[(count * triton.cdiv(self.k_len, tile.keys), q.shape[0] * q.shape[1])](
            *(_source(x, rows, depth, tile.tma) for x, rows in (
                (q, tile.queries), (k, tile.keys), (v, tile.keys), (d_out, tile.queries))),
            p, ds, lse, delta, *by_queries[:3], *by_keys[:3], by_queries[3], by_keys[3], *strides(q, k, v, d_out, p),
            begin, q.shape[1], self.q_len, self.k_len, p.shape[2], p.shape[3], DEPTH=depth, **self._constants(tile),
        )  # fmt: skip

    def query_product(self, begin: int, ds: Tensor, k: Tensor, dq: Tensor) -> None:
        """Writes dq of the queries from ``begin`` on."""
        tile, width = self.tiles.d_query, self.tiles.width
        lo, hi, holes, stride = self._by("key")
        count = triton.cdiv(min(ds.shape[2], self.q_len - begin), tile.queries)
        grid = (count * triton.cdiv(self.settings.head_size, width), dq.shape[0] * dq.shape[1])
        _query_product_kernel[grid](
            _source(ds, tile.queries, tile.keys, tile.tma), _source(k, tile.keys, width, tile.tma), dq, lo, hi, holes,
            stride, *strides(ds, k, dq), begin, dq.shape[1], self.q_len, self.k_len, ds.shape[2], ds.shape[3], count,
            WIDTH=width, **self._constants(tile, "SOFTCAP", "FAST_TANH", "BLOCK_D"),
        )  # fmt: skip

    def key_product(
        self, begin: int, weights: Tensor, y: Tensor, total: Tensor, out: Tensor, **constants: bool | float
    ) -> None:
        """Adds to ``total`` what the queries from ``begin`` on give; the last chunk writes ``out``."""
        tile, width = self.tiles.d_key, self.tiles.width
        lo, hi, holes, stride = self._by("query")
        count = triton.cdiv(self.k_len, tile.keys) * triton.cdiv(self.settings.head_size, width)
        _key_product_kernel[(count, y.shape[0] * self.key_heads)](
            _source(weights, tile.queries, tile.keys, tile.tma), _source(y, tile.queries, width, tile.tma), total, out,
            lo, hi, holes, stride, *strides(weights, y, total, out), begin, self.key_heads, self.q_len, self.k_len,
            weights.shape[2], weights.shape[3], WIDTH=width, **constants,
            **self._constants(tile, "SOFTCAP", "FAST_TANH", "BLOCK_D", "SCALE"),
        )  # fmt: skip


def _source(tensor: Tensor, rows: int, columns: int, tma: bool) -> Tensor | TensorDescriptor:
    """The source of ``_load``: the tensor's pointer, or a descriptor of tiles of one head."""
    if not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, columns])
