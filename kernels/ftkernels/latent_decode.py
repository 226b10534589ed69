"""Latent attention of one new token a row against cached latents, in pages: two kernels, and plain torch beside.

Legend: B rows, H query heads, C features of the latent that keys and values come from, R rotated ones of the key that
all heads share, E = C + R, N features of a head without rotation, V of its values, P positions of a page; G pages of
the pool, T pages of a row's table at most.

Keys and values are not formed (arXiv 2405.04434, §2.1.2): with W_k (N, C) and W_v (V, C) of a head, the rows of the
layer that would expand the latent c_j (C,) of position j, and k_j (R,) its rotated key,

    s_j = scale * (q_n . W_k c_j + q_r . k_j) = scale * [W_k^T q_n | q_r] . [c_j | k_j]
    out = W_v sum_j softmax(s)_j c_j

so that a position is E numbers for all heads, which are one tile's rows. ``absorbed`` and ``expanded`` are the products
in front and behind, ``decode_latents`` what lies between; pages, shares and their sum are as in
``ftkernels.decode_attention``. Without a backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.attention_parts import LOG2E
from ftkernels.decode_attention import splits_for, sum_of_shares
from ftkernels.device import BackendName, choose_backend, on_device_of, rounded, store_dtype, triton_store_dtype
from ftkernels.latent_heads import LatentSizes
from ftkernels.limits import CACHE_PAGE as PAGE
from ftkernels.projection import Projection, dense

#: Query heads of a program at most, and positions that it reads at once; half of them where elements are wider.
_HEADS, _KEYS = 32, 32


def absorbed(q: Tensor, projection: Projection, sizes: LatentSizes) -> Tensor:
    """W_k^T q_n of every head: (B, H, N) -> (B, H, C), in q's dtype.

    Args:
        projection: The layer that expands latents to keys and values, (H * (N + V), C), with its adapter.
    """
    by_head = q.transpose(0, 1)  # a product a head
    w = _weight(projection, sizes, q.dtype)[:, : sizes.plain]
    out = torch.bmm(by_head, w)
    if projection.a is not None and projection.b is not None:
        b = _of_heads(projection.b.to(q.dtype), sizes)[:, : sizes.plain]
        low = torch.bmm(by_head, b) * projection.scaling
        out = out + low @ projection.a.to(q.dtype)
    return out.transpose(0, 1)


def expanded(latents: Tensor, projection: Projection, sizes: LatentSizes) -> Tensor:
    """W_v c of every head: (B, H, C) -> (B, H, V), in the latents' dtype. ``projection``: as of :func:`absorbed`."""
    by_head = latents.transpose(0, 1)
    w = _weight(projection, sizes, latents.dtype)[:, sizes.plain :]
    out = torch.bmm(by_head, w.transpose(1, 2))
    if projection.a is not None and projection.b is not None:
        b = _of_heads(projection.b.to(latents.dtype), sizes)[:, sizes.plain :]
        low = (by_head @ projection.a.to(latents.dtype).t()) * projection.scaling
        out = out + torch.bmm(low, b.transpose(1, 2))
    return out.transpose(0, 1)


def _weight(projection: Projection, sizes: LatentSizes, dtype: torch.dtype) -> Tensor:
    return _of_heads(dense(projection.operand(dtype), dtype), sizes)


def _of_heads(rows: Tensor, sizes: LatentSizes) -> Tensor:
    """(H * (N + V), K) -> (H, N + V, K)."""
    return rows.view(sizes.heads, sizes.plain + sizes.value, -1)


@triton.jit
def _share_kernel(
    q_ptr,
    new_ptr,
    pool_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    peak_ptr,
    total_ptr,
    q_stride_b,
    q_stride_h,
    new_stride,
    table_stride,
    heads,
    blocks,
    FACTOR: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CD: tl.constexpr,
):
    """A row, a block of its heads and a share of its positions a program."""
    E: tl.constexpr = C + R
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    split = tl.program_id(1)
    cached = tl.load(length_ptr + row) - 1  # positions before the new one; -1 for an empty row
    head = block * QUERIES + tl.arange(0, QUERIES)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    ok = (head < heads)[:, None]
    q_at = q_ptr + row * q_stride_b + head[:, None] * q_stride_h
    q_c = tl.load(q_at + c[None, :], mask=ok & (c < C)[None, :], other=0.0).to(CD)
    q_r = tl.load(q_at + C + r[None, :], mask=ok & (r < R)[None, :], other=0.0).to(CD)
    table_ptr += row * table_stride
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, BLOCK_C), tl.float32)
    turns = tl.maximum(tl.cdiv(cached, KEYS), 0)
    share = tl.cdiv(turns, SPLITS)
    for i in range(split * share, tl.minimum(split * share + share, turns)):
        positions = i * KEYS + tl.arange(0, KEYS)
        page = tl.load(table_ptr + i * KEYS // POSITIONS).to(tl.int64)
        at = pool_ptr + (page * POSITIONS + positions % POSITIONS)[:, None] * E
        seen = positions < cached  # what lies behind them may be NaN
        k_c = tl.load(at + c[None, :], mask=seen[:, None] & (c < C)[None, :], other=0.0).to(CD)
        k_r = tl.load(at + C + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0).to(CD)
        x = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
        x = (x + tl.dot(q_r, tl.trans(k_r), input_precision="ieee")) * FACTOR
        x = tl.where(seen[None, :], x, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 1))  # each turn has a position that is seen
        p = tl.exp2(x - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None] + tl.dot(p.to(CD), k_c, input_precision="ieee")
        peak = new_peak
    if (split == 0) & (cached >= 0):  # the new token
        new_at = new_ptr + row * new_stride
        new_c = tl.load(new_at + c, mask=c < C, other=0.0)
        new_r = tl.load(new_at + C + r, mask=r < R, other=0.0)
        if block == 0:
            spot = tl.load(table_ptr + cached // POSITIONS).to(tl.int64) * POSITIONS + cached % POSITIONS
            tl.store(pool_ptr + spot * E + c, new_c.to(pool_ptr.dtype.element_ty), mask=c < C)
            tl.store(pool_ptr + spot * E + C + r, new_r.to(pool_ptr.dtype.element_ty), mask=r < R)
        x = tl.sum(q_c.to(tl.float32) * new_c[None, :].to(tl.float32), 1)
        x = (x + tl.sum(q_r.to(tl.float32) * new_r[None, :].to(tl.float32), 1)) * FACTOR
        new_peak = tl.maximum(peak, x)
        p = tl.exp2(x - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + p
        acc = acc * decay[:, None] + p[:, None] * new_c[None, :].to(tl.float32)
        peak = new_peak
    part = (row * heads + head) * SPLITS + split
    if SPLITS == 1:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    else:
        tl.store(peak_ptr + part, peak, mask=head < heads)
        tl.store(total_ptr + part, total, mask=head < heads)
    tl.store(out_ptr + part[:, None] * C + c[None, :], acc.to(out_ptr.dtype.element_ty), mask=ok & (c < C)[None, :])


def decode_latents(
    q: Tensor,
    new: Tensor,
    pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    width: int,
    scale: float,
    longest: int | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """Latents weighted by each head, (B, H, C), in q's dtype; ``new`` is written into ``pool``.

    Args:
        q: (B, H, E), the part that is absorbed and then the rotated one.
        new: (B, E), the new token's latent and its rotated key.
        pool: (G, P, E), contiguous, in ``new``'s dtype.
        table: (B, T) int32, pages of each row in order.
        lengths: (B,) int32, tokens of each row with the new one; 0 for an empty row, whose output is zero.
        width: C.
        longest: The host's bound on ``lengths``: plain torch reads no further. The kernels need none.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    _check(q, new, pool, table, lengths, width)
    if not choose_backend(q.device, backend).is_triton:
        return decode_latents_reference(q, new, pool, table, lengths, width=width, scale=scale, longest=longest)
    return _launch(q, new, pool, table, lengths, width, scale)


def _launch(q: Tensor, new: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, width: int, scale: float) -> Tensor:
    batch, heads, features = q.shape
    half = 1 if q.element_size() == 2 else 2
    queries = min(max(16, triton.next_power_of_2(heads)), _HEADS // half)
    blocks = triton.cdiv(heads, queries)
    splits = splits_for(batch, blocks, table.shape[1] * PAGE)
    out = torch.empty((batch, heads, width), dtype=store_dtype(q.dtype), device=q.device)
    parts = out if splits == 1 else q.new_empty((batch, heads, splits, width), dtype=torch.float32)
    peaks, totals = (q.new_empty((batch, heads, splits), dtype=torch.float32) for _ in range(2))
    with on_device_of(q):
        _share_kernel[(batch * blocks, splits)](
            q,
            new,
            pool,
            table,
            lengths,
            parts,
            peaks,
            totals,
            q.stride(0),
            q.stride(1),
            new.stride(0),
            table.stride(0),
            heads,
            blocks,
            FACTOR=scale * LOG2E,
            C=width,
            R=features - width,
            BLOCK_C=max(16, triton.next_power_of_2(width)),
            BLOCK_R=max(16, triton.next_power_of_2(features - width)),
            QUERIES=queries,
            SPLITS=splits,
            KEYS=_KEYS // half,
            POSITIONS=PAGE,
            CD=triton_store_dtype(q.dtype),
            num_warps=8,
            num_stages=2,
        )
        if splits > 1:
            sum_of_shares(parts, peaks, totals, out)
    return rounded(out, q.dtype)


def decode_latents_reference(
    q: Tensor,
    new: Tensor,
    pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    width: int,
    scale: float,
    longest: int | None = None,
) -> Tensor:
    """:func:`decode_latents` in plain torch, scores and sums in float32 (float64 for float64 inputs)."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (lengths > 0).nonzero()[:, 0]
    at = lengths[rows].long() - 1
    pool[table[rows, at // PAGE].long(), at % PAGE] = new[rows].to(pool.dtype)
    used = table.shape[1] if longest is None else min(table.shape[1], -(-longest // PAGE))
    seen = torch.arange(used * PAGE, device=q.device)[None] < lengths[:, None]
    cached = pool[table[:, :used].long()].flatten(1, 2).to(exact).masked_fill(~seen[..., None], 0.0)
    scores = (q.to(exact) @ cached.transpose(1, 2)) * scale
    weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=-1).nan_to_num(0.0)
    return (weights @ cached[..., :width]).to(q.dtype)


def _check(q: Tensor, new: Tensor, pool: Tensor, table: Tensor, lengths: Tensor, width: int) -> None:
    batch, features = q.shape[0], q.shape[-1]
    if q.dim() != 3 or new.shape != (batch, features) or not 0 < width < features:
        raise ValueError(f"q {tuple(q.shape)} and {tuple(new.shape)} are not latents of {width} features and keys")
    if pool.shape[1:] != (PAGE, features) or pool.dtype != new.dtype or not pool.is_contiguous():
        raise ValueError(f"pages {tuple(pool.shape)} in {pool.dtype} do not take {tuple(new.shape)} in {new.dtype}")
    if table.dim() != 2 or table.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(f"table {tuple(table.shape)} and lengths {tuple(lengths.shape)} are not of {batch} rows")
    if table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(f"table and lengths must be int32, not {table.dtype} and {lengths.dtype}")
    if q.stride(2) != 1 or new.stride(1) != 1:
        raise ValueError("the features of a head must lie next to each other")
