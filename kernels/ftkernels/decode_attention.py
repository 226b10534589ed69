"""Attention of one new token a row against its cached keys and values, in pages: two kernels, and plain torch beside.

Legend: B rows, Hq query heads, Hkv key heads, D head size, P positions of a page, N pages of the pool, T pages of a
row's table at most.

A row's sequence has ``length`` tokens, the new one among them: the query stands at position ``length - 1``. Positions
before it lie in the pages that the row's table names, in order; the new token's key and value come with the call, are
seen, and are written to their place in the last page. With W the window (0: none), one query head computes

    s_j = softcap(scale * q . k_j)   for max(0, length - W) <= j < length;    softcap(x) = c * tanh(x / c), or x
    out = sum_j exp(s_j) v_j / (exp(sink) + sum_j exp(s_j));    exp(sink) only where the head has a sink

A row of length 0 is empty: nothing is read or written for it, and its output is zero.

The first kernel has a program for each row, key head and share of the sequence (flash decoding, Dao et al., 2023):
with few rows a program a head would leave most of the GPU idle. The query heads of one key head are the rows of one
tile, so that each key is read once. The first share counts the sinks. The second kernel adds the shares up, in a fixed
order. Nothing depends on other rows.

Completions of one prompt begin with the same pages. Where it is told which rows do (:class:`SharedPages`), a program
between the two takes the queries of several rows as one tile over such pages, which are read once for all of them
instead of once a row; what a row then has of its own is left to the first kernel. Its sums are shares more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.attention_config import padded_size
from ftkernels.attention_parts import LOG2E, bounded, softmax_of_sinks
from ftkernels.device import (
    BackendName,
    choose_backend,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
    triton_store_dtype,
)
from ftkernels.limits import CACHE_PAGE as PAGE

#: Programs that the first kernel is split into at least, where sequences are long enough.
_PROGRAMS = 1056
_MOST_SPLITS = 32
#: The same of the kernel over pages that rows share: one wave on a large GPU, and no share below a page.
_SHARED_PROGRAMS, _MOST_SHARED_SPLITS = 264, 16
#: Rows that share pages in one line of :class:`SharedPages`.
LINE = 8


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's pool of cached keys and values: (N, Hkv, P, D) each, contiguous."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Which rows of a batch begin with the same pages.

    Attributes:
        members: (B, :data:`LINE`) int32, contiguous. A line names rows that do, -1 behind them; a line of none is -1
            throughout.
        pages: (B,) int32, how many each row has in common with the others of its line; 0: it is in no line.
    """

    members: Tensor
    pages: Tensor


@triton.jit
def _pages_of_share(cached, split, skipped, WINDOW: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """(lo, begin, end): the first position that is seen, and the share's first page and the one past its last, behind
    those that are ``skipped``.
    """
    lo = 0
    if WINDOW > 0:
        lo = tl.maximum(cached + 1 - WINDOW, 0)
    first = tl.maximum(lo // KEYS, skipped)
    pages = tl.maximum(tl.cdiv(cached, KEYS) - first, 0)
    share = tl.cdiv(pages, SPLITS)
    begin = first + split * share
    end = tl.minimum(begin + share, first + pages)
    return lo, begin, end


@triton.jit
def _over_pages(
    q, peak, total, keys_ptr, values_ptr, table_ptr, table_width, key_heads, head, cached, lo, begin, end, dims, there,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr, FACTOR: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, CD: tl.constexpr,
):  # fmt: skip
    """(peak, total, acc) with the share's pages: the highest score, the sum of weights (QUERIES,), of weighted values;
    ``peak`` and ``total`` are those before.
    """
    acc = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    within = tl.arange(0, KEYS)[:, None] * D + dims[None, :]
    # The next page's number is loaded a turn ahead: so the loop's loads can be pipelined.
    page = tl.load(table_ptr + tl.minimum(begin, table_width - 1))
    for i in range(begin, end):
        at = (page.to(tl.int64) * key_heads + head) * (KEYS * D) + within
        page = tl.load(table_ptr + tl.minimum(i + 1, table_width - 1))
        positions = i * KEYS + tl.arange(0, KEYS)
        written = (positions < cached)[:, None] & there[None, :]  # what lies behind them may be NaN
        k = tl.load(keys_ptr + at, mask=written, other=0.0).to(CD)
        v = tl.load(values_ptr + at, mask=written, other=0.0).to(CD)
        x = bounded(tl.dot(q, tl.trans(k), input_precision="ieee"), SCALE, SOFTCAP, FAST_TANH) * FACTOR
        x = tl.where(((positions < cached) & (positions >= lo))[None, :], x, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 1))  # each page has a position that is seen
        p = tl.exp2(x - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(CD), v, input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def _share_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    length_ptr,
    shared_ptr,
    out_ptr,
    peak_ptr,
    total_ptr,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_h,
    v_stride_b,
    v_stride_h,
    table_stride,
    table_width,
    key_heads,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FAST_TANH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
    CD: tl.constexpr,
):
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    row = tl.program_id(0) // key_heads
    head = tl.program_id(0) % key_heads
    row64 = row.to(tl.int64)
    split = tl.program_id(1)
    cached = tl.load(length_ptr + row) - 1  # tokens before the new one; -1 for an empty row
    skipped = 0 if shared_ptr is None else tl.load(shared_ptr + row)
    lo, begin, end = _pages_of_share(cached, split, skipped, WINDOW, SPLITS, KEYS)
    group = tl.arange(0, QUERIES)
    dims = tl.arange(0, BLOCK_D)
    there = dims < D
    query = (group < GROUP)[:, None] & there[None, :]
    q_at = q_ptr + row64 * q_stride_b + (head * GROUP + group)[:, None] * q_stride_h + dims[None, :]
    q = tl.load(q_at, mask=query, other=0.0).to(CD)
    table_ptr += row64 * table_stride
    if sinks_ptr is None:
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
    else:
        counted = (group < GROUP) & (split == 0)
        sinks = tl.load(sinks_ptr + head * GROUP + group, mask=counted, other=float("-inf"))
        peak, total = softmax_of_sinks(sinks)
    peak, total, acc = _over_pages(
        q, peak, total, keys_ptr, values_ptr, table_ptr, table_width, key_heads, head, cached, lo, begin, end, dims,
        there, SCALE, SOFTCAP, FAST_TANH, FACTOR, D, BLOCK_D, QUERIES, KEYS, CD,
    )  # fmt: skip
    if (split == 0) & (cached >= 0):  # the new token
        k_at = k_ptr + row64 * k_stride_b + head * k_stride_h + dims
        v_at = v_ptr + row64 * v_stride_b + head * v_stride_h + dims
        new_k = tl.load(k_at, mask=there, other=0.0)
        new_v = tl.load(v_at, mask=there, other=0.0)
        new_page = tl.load(table_ptr + cached // KEYS).to(tl.int64)
        spot = ((new_page * key_heads + head) * KEYS + cached % KEYS) * D + dims
        tl.store(keys_ptr + spot, new_k.to(keys_ptr.dtype.element_ty), mask=there)
        tl.store(values_ptr + spot, new_v.to(values_ptr.dtype.element_ty), mask=there)
        dot = tl.sum(q.to(tl.float32) * new_k[None, :].to(tl.float32), 1)
        x = bounded(dot, SCALE, SOFTCAP, FAST_TANH) * FACTOR
        new_peak = tl.maximum(peak, x)
        p = tl.exp2(x - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + p
        acc = acc * decay[:, None] + p[:, None] * new_v[None, :].to(tl.float32)
        peak = new_peak
    heads = key_heads * GROUP
    part = (row64 * heads + head * GROUP + group) * PARTS + split
    if PARTS == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        tl.store(peak_ptr + part, peak, mask=group < GROUP)
        tl.store(total_ptr + part, total, mask=group < GROUP)
    tl.store(out_ptr + part[:, None] * D + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=query)


@triton.jit
def _line_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, members_ptr, shared_ptr, out_ptr, peak_ptr, total_ptr, q_stride_b,
    q_stride_h, table_stride, table_width, key_heads, LINE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FAST_TANH: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, SPLITS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, CD: tl.constexpr,
):  # fmt: skip
    """A share of the pages that up to ROWS rows of a line begin with, for one key head."""
    FACTOR: tl.constexpr = (SCALE if SOFTCAP == 0.0 else SOFTCAP) * LOG2E
    first_of_line = members_ptr + (tl.program_id(0) // key_heads).to(tl.int64) * ROWS
    head = tl.program_id(0) % key_heads
    split = tl.program_id(1)
    first = tl.load(first_of_line)
    pages = tl.load(shared_ptr + first, mask=first >= 0, other=0)
    if pages > 0:
        share = tl.cdiv(pages, SPLITS)
        begin = split * share
        end = tl.minimum(begin + share, pages)
        query = tl.arange(0, QUERIES)
        member, group = query // GROUP, query % GROUP
        row = tl.load(first_of_line + member, mask=member < ROWS, other=-1)
        row64 = row.to(tl.int64)
        dims = tl.arange(0, BLOCK_D)
        there = dims < D
        asked = (row >= 0)[:, None] & there[None, :]
        q_at = q_ptr + row64[:, None] * q_stride_b + (head * GROUP + group)[:, None] * q_stride_h + dims[None, :]
        q = tl.load(q_at, mask=asked, other=0.0).to(CD)
        peak = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        peak, total, acc = _over_pages(
            q, peak, total, keys_ptr, values_ptr, table_ptr + first.to(tl.int64) * table_stride, table_width, key_heads,
            head, pages * KEYS, 0, begin, end, dims, there, SCALE, SOFTCAP, FAST_TANH, FACTOR, D, BLOCK_D, QUERIES,
            KEYS, CD,
        )  # fmt: skip
        part = (row64 * (key_heads * GROUP) + head * GROUP + group) * (OWN + SPLITS) + OWN + split
        tl.store(peak_ptr + part, peak, mask=row >= 0)
        tl.store(total_ptr + part, total, mask=row >= 0)
        tl.store(out_ptr + part[:, None] * D + dims[None, :], acc, mask=asked)


@triton.jit
def _sum_kernel(
    parts_ptr, peak_ptr, total_ptr, shared_ptr, out_ptr, heads, D: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    made = splits < SPLITS
    if shared_ptr is not None:  # a row without shared pages has no sums of them
        made = made & ((splits < OWN) | (tl.load(shared_ptr + head // heads) > 0))
    peaks = tl.load(peak_ptr + head * SPLITS + splits, mask=made, other=float("-inf"))
    totals = tl.load(total_ptr + head * SPLITS + splits, mask=made, other=0.0)
    peak = tl.max(peaks, 0)
    weights = tl.where(peaks == float("-inf"), 0.0, tl.exp2(peaks - tl.where(peak == float("-inf"), 0.0, peak)))
    at = (head * SPLITS + splits)[:, None] * D + dims[None, :]
    parts = tl.load(parts_ptr + at, mask=made[:, None] & (dims < D)[None, :], other=0.0)
    total = tl.sum(totals * weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + head * D + dims, out.to(out_ptr.dtype.element_ty), mask=dims < D)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    longest: int | None = None,
    shared: SharedPages | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """(B, Hq, D), in q's dtype; the new token's key and value are written into ``pages``.

    Args:
        q: (B, Hq, D); k, v: (B, Hkv, D), of the new token, rotated. The last dimension is contiguous.
        pages: In k's dtype.
        table: (B, T) int32, pages of each row in order.
        lengths: (B,) int32, tokens of each row with the new one; 0 for an empty row.
        window: Keys that a query sees, its own among them; None for all.
        sinks: (Hq,), contiguous, of any floating dtype; None for none.
        longest: The host's bound on ``lengths``: plain torch reads no further. The kernels need none.
        shared: Pages that the kernels read once for several rows, which changes nothing but the order of sums. New
            tokens lie behind them, and there is no window.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check(q, k, v, pages, table, lengths)
    _check_sinks(sinks, q)
    _check_shared(shared, q, window)
    if not choose_backend(q.device, backend).is_triton:
        return decode_attention_reference(
            q, k, v, pages, table, lengths, scale=scale, softcap=softcap, window=window, sinks=sinks, longest=longest
        )
    return _launch(q, k, v, pages, table, lengths, scale, softcap, window or 0, sinks, shared)


def splits_for(rows: int, key_heads: int, positions: int) -> int:
    """Shares of a sequence of at most ``positions``: enough programs to fill a GPU, each of at least two pages."""
    wanted = triton.cdiv(_PROGRAMS, max(rows * key_heads, 1))
    return int(max(1, min(wanted, _MOST_SPLITS, triton.cdiv(positions, 2 * PAGE))))


def _stages(bytes_of_a_head: int) -> int:
    """Pages in flight, of keys and values each: what 99 KiB of shared memory have room for."""
    return 3 if bytes_of_a_head <= 256 else 2 if bytes_of_a_head <= 512 else 1


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    shared: SharedPages | None,
) -> Tensor:
    batch, heads, size = q.shape
    key_heads = k.shape[1]
    reach = table.shape[1] * PAGE
    own = splits_for(batch, key_heads, min(reach, window + PAGE) if window else reach)
    splits = own if shared is None else own + _shared_splits(batch, key_heads, table.shape[1])
    out = torch.empty((batch, heads, size), dtype=store_dtype(q.dtype), device=q.device)
    parts = out if splits == 1 else q.new_empty((batch, heads, splits, size), dtype=torch.float32)
    peaks, totals = (q.new_empty((batch, heads, splits), dtype=torch.float32) for _ in range(2))
    common = {
        "GROUP": heads // key_heads,
        "SCALE": scale,
        "SOFTCAP": softcap,
        "FAST_TANH": q.dtype != torch.float32 and not interpreting(),
        "D": size,
        "BLOCK_D": padded_size(size),
        "KEYS": PAGE,
        "CD": triton_store_dtype(q.dtype),
        "num_stages": _stages(size * q.element_size()),
    }
    with on_device_of(q):
        _share_kernel[(batch * key_heads, own)](
            q,
            k,
            v,
            sinks,
            pages.keys,
            pages.values,
            table,
            lengths,
            None if shared is None else shared.pages,
            parts,
            peaks,
            totals,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            table.stride(0),
            table.shape[1],
            key_heads,
            WINDOW=window,
            QUERIES=max(16, triton.next_power_of_2(heads // key_heads)),
            SPLITS=own,
            PARTS=splits,
            num_warps=8 if size > 256 and q.element_size() == 2 else 4,
            **common,
        )
        if shared is not None:
            rows = _rows_of_a_tile(heads // key_heads, padded_size(size), q.element_size())
            _line_kernel[(batch * (LINE // rows) * key_heads, splits - own)](
                q, pages.keys, pages.values, table, shared.members, shared.pages, parts, peaks, totals, q.stride(0),
                q.stride(1), table.stride(0), table.shape[1], key_heads, LINE=LINE, ROWS=rows,
                QUERIES=max(16, triton.next_power_of_2(rows * heads // key_heads)), SPLITS=splits - own, OWN=own,
                num_warps=8 if size > 256 and q.element_size() == 2 else 4, **common,
            )  # fmt: skip
        if splits > 1:
            sum_of_shares(parts, peaks, totals, out, own=own, shared=shared)
    return rounded(out, q.dtype)


def _shared_splits(rows: int, key_heads: int, pages: int) -> int:
    """Shares of pages that rows have in common, where most lines are full."""
    wanted = triton.cdiv(_SHARED_PROGRAMS, triton.cdiv(rows, LINE) * key_heads)
    return int(max(1, min(wanted, _MOST_SHARED_SPLITS, pages)))


def _rows_of_a_tile(group: int, block_d: int, itemsize: int) -> int:
    """Rows whose queries are one tile: no more than registers hold sums of, without tensor cores much less."""
    rows, queries = LINE, 64 if itemsize == 2 else 16
    while rows > 1 and (rows * group > queries or rows * group * block_d > 8192):
        rows //= 2
    return rows


def sum_of_shares(
    parts: Tensor, peaks: Tensor, totals: Tensor, out: Tensor, *, own: int = 0, shared: SharedPages | None = None
) -> None:
    """Adds up what programs made of their shares, into ``out`` (B, H, D).

    Args:
        parts: (B, H, shares, D), weighted sums of values, float32.
        peaks: (B, H, shares), the highest scores; ``totals``: the sums of weights.
        own: So many shares are those of a row's own pages, where some are ``shared``.
    """
    batch, heads, splits, size = parts.shape
    block, block_d = triton.next_power_of_2(splits), padded_size(size)
    _sum_kernel[(batch * heads,)](
        parts, peaks, totals, None if shared is None else shared.pages, out, heads, D=size, BLOCK_D=block_d,
        SPLITS=splits, OWN=own, BLOCK=block, num_warps=2 if block * block_d <= 8192 else 8,
    )  # fmt: skip


def decode_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Pages,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """:func:`decode_attention` in plain torch, scores and sums in float32 (float64 for float64 inputs)."""
    batch, heads, size = q.shape
    key_heads = k.shape[1]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    _write(k, v, pages, table, lengths)
    used = table.shape[1] if longest is None else min(table.shape[1], -(-longest // PAGE))
    keys, values = (_gathered(pool, table[:, :used]) for pool in (pages.keys, pages.values))
    grouped = q.view(batch, key_heads, heads // key_heads, size)
    scores = (grouped.to(exact) @ keys.to(exact).transpose(2, 3)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(keys.shape[2], device=q.device)[None]
    seen = position < lengths[:, None]
    if window is not None:
        seen = seen & (position >= lengths[:, None] - window)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(exact).view(1, key_heads, heads // key_heads, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].nan_to_num(0.0)  # an empty row has no scores
    values = values.to(exact).masked_fill(~seen[:, None, :, None], 0.0)  # memory that nothing was written to
    return (weights @ values).view(batch, heads, size).to(q.dtype)


def _write(k: Tensor, v: Tensor, pages: Pages, table: Tensor, lengths: Tensor) -> None:
    """The new token's key and value to their places."""
    rows = (lengths > 0).nonzero()[:, 0]
    at = lengths[rows].long() - 1
    page = table[rows, at // PAGE].long()
    pages.keys[page, :, at % PAGE] = k[rows].to(pages.keys.dtype)
    pages.values[page, :, at % PAGE] = v[rows].to(pages.values.dtype)


def _gathered(pool: Tensor, table: Tensor) -> Tensor:
    """(B, Hkv, T * P, D): the pages of each row, one after the other."""
    return pool[table.long()].transpose(1, 2).flatten(2, 3)


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != (q.shape[1],) or not sinks.is_floating_point() or not sinks.is_contiguous():
        raise ValueError(
            f"sinks {tuple(sinks.shape)} in {sinks.dtype} are not one for each of {q.shape[1]} query heads"
        )


def _check_shared(shared: SharedPages | None, q: Tensor, window: int | None) -> None:
    if shared is None:
        return
    if window is not None:
        raise ValueError("rows with a window do not see the pages that they share")
    if shared.members.shape != (q.shape[0], LINE) or shared.pages.shape != (q.shape[0],):
        raise ValueError(f"{tuple(shared.members.shape)} members are not those of {q.shape[0]} rows")
    if shared.members.dtype != torch.int32 or shared.pages.dtype != torch.int32 or not shared.members.is_contiguous():
        raise ValueError("members and pages must be int32 and contiguous")


def _check(q: Tensor, k: Tensor, v: Tensor, pages: Pages, table: Tensor, lengths: Tensor) -> None:
    batch, heads, size = q.shape
    key_heads = k.shape[1]
    if k.shape != (batch, key_heads, size) or v.shape != k.shape or heads % key_heads:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are not heads of one token")
    for pool in (pages.keys, pages.values):
        if pool.shape[1:] != (key_heads, PAGE, size) or pool.dtype != k.dtype or not pool.is_contiguous():
            raise ValueError(
                f"pages {tuple(pool.shape)} in {pool.dtype} do not take keys {tuple(k.shape)} in {k.dtype}"
            )
    if table.dim() != 2 or table.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(f"table {tuple(table.shape)} and lengths {tuple(lengths.shape)} are not of {batch} rows")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(f"table and lengths must be int32, not {table.dtype} and {lengths.dtype}")
    if q.stride(2) != 1 or k.stride(2) != 1 or v.stride(2) != 1:
        raise ValueError("the features of a head must lie next to each other")
