"""Products whose rows belong to groups, each with a matrix of its own: the experts that tokens were sent to.

Legend: T tokens, P experts a token, M = T * P pairs of both, G groups (experts). A router gives ``index`` (T, P). Rows
of grouped tensors are the pairs sorted by their expert; within one they keep their order, so that every sum has one
order.

    product   y[i] = x[i] @ W_g  (+ thin[i] @ wide_g) (+ bias_g)    g the group of row i
    thin      y[i] = x[i] @ F_g.T                                  (R columns)
    outer     out_g = sum over rows i of g of thin[i].T @ wide[i]  (R, N)
    weight    out_g = sum over rows i of g of left[i].T @ right[i] (A, B), both wide: the gradient of W_g
    gathered  out[t] = sum over p of weight[t, p] * y[place[t, p]]

``rows``: x is read at these rows, so that no copy of the tokens by expert is made. Nothing waits for the device: grids
have as many programs as the worst routing needs, and those without rows end at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ftkernels.device import (
    accumulate_dtype,
    gpu_of,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
    triton_store_dtype,
)
from ftkernels.glu import glu_reference
from ftkernels.grouped_kernels import (
    interleaved_unit_kernel,
    outer_kernel,
    product_kernel,
    sum_kernel,
    thin_kernel,
    tiles_kernel,
    turn_kernel,
    unit_backward_kernel,
    unit_kernel,
    weight_kernel,
)
from ftkernels.limits import Unit
from ftkernels.primitives import CLAMPED_LIMIT, CLAMPED_SLOPE


class Groups(NamedTuple):
    """A routing, sorted: everything int32.

    edges: (G + 1,) where each group's rows begin, and the last one's end. token: (M,) the token of a row. pair: (M,)
    its place in the router's output, token * P + p. place: (T, P) the row of a pair. tiles: (n, 2) for the kernels, or
    None. rows_a_tile: what they were made for. shared: the GPU's shared memory for a program, in bytes.
    """

    edges: Tensor
    token: Tensor
    pair: Tensor
    place: Tensor
    tiles: Tensor | None
    rows_a_tile: int
    shared: int = 0

    @property
    def count(self) -> int:
        """G."""
        return int(self.edges.shape[0]) - 1


class Low(NamedTuple):
    """A low-rank term of a product: thin (M, R), wide (G, R, N)."""

    thin: Tensor
    wide: Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Columns, depth, warps and stages of a product's tile, by the rows of it."""

    columns: int
    depth: int
    warps: int
    stages: int


class WeightTile(NamedTuple):
    """Columns of both operands, rows a step, warps and stages of the tile of a weight's gradient."""

    left: int
    right: int
    depth: int
    warps: int
    stages: int


#: See docs/performance.md, "Experts".
_WEIGHT = WeightTile(128, 128, 64, 8, 4)

# By the rows of a tile. `unit` has two accumulators of so many columns. See docs/performance.md, "Experts".
_PRODUCT = {128: _Tile(256, 64, 8, 4), 64: _Tile(128, 64, 4, 3), 16: _Tile(64, 128, 4, 4)}
_UNIT = {128: _Tile(128, 64, 8, 4), 64: _Tile(64, 64, 4, 3), 16: _Tile(32, 128, 4, 4)}
_SMALL = _Tile(32, 32, 4, 1)
#: GPUs with less shared memory for a program are older than Hopper, or smaller.
_WIDE_TILES = 200 * 1024
_INTERPRETED_ROWS = 16


def rows_a_tile(pairs: int, groups: int) -> int:
    """Rows of a tile of products: few where a group has few, as in decoding."""
    if interpreting():
        return _INTERPRETED_ROWS
    each = pairs / groups
    return 128 if each >= 96 else 64 if each >= 24 else 16


def group_rows(index: Tensor, groups: int, *, kernels: bool) -> Groups:
    """The rows of a routing ``index`` (T, P), integers in [0, groups), sorted by group, for the kernels or torch."""
    tokens, top = index.shape
    pairs = tokens * top
    small = torch.int16 if groups < 2**15 else torch.int32  # radix sort goes over the keys' bytes
    keys, pair = index.reshape(-1).to(small).sort(stable=True)
    edges = torch.searchsorted(keys, torch.arange(groups + 1, device=index.device, dtype=small), out_int32=True)
    pair = pair.to(torch.int32)
    place = torch.empty(pairs, dtype=torch.int32, device=index.device)
    place.scatter_(0, pair.long(), torch.arange(pairs, dtype=torch.int32, device=index.device))
    rows = rows_a_tile(pairs, groups)
    tiles = _tiles(edges, groups, pairs, rows) if kernels else None
    shared = gpu_of(index.device).shared_memory_bytes
    return Groups(edges, pair // top, pair, place.view(tokens, top), tiles, rows, shared)


def _tiles(edges: Tensor, groups: int, pairs: int, rows: int) -> Tensor:
    most = pairs // rows + min(groups, pairs)
    tiles = torch.empty((most, 2), dtype=torch.int32, device=edges.device)
    block = 64
    with on_device_of(edges):
        tiles_kernel[(triton.cdiv(most, block),)](
            edges, tiles, groups, most, BM=rows, BG=triton.next_power_of_2(groups), BT=block
        )
    return tiles


def grouped_product(
    x: Tensor, weight: Tensor, groups: Groups, *, rows: Tensor | None = None, transposed: bool = False,
    low: Low | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(M, N): x (M or T, K) by weight (G, N, K), or with ``transposed`` (G, K, N), of any strides; bias (G, N).
    Everything in one dtype.
    """
    columns = int(weight.shape[2 if transposed else 1])
    if groups.tiles is None:
        return _product_torch(x, weight, groups, rows, transposed, low, bias)
    pairs, depth = groups.token.shape[0], int(x.shape[1])
    y = torch.empty((pairs, columns), dtype=store_dtype(x.dtype), device=x.device)
    strides = weight.stride()
    w_n, w_k = (strides[2], strides[1]) if transposed else (strides[1], strides[2])
    tile = _tile_of(_PRODUCT, groups, x.dtype)
    parts = triton.cdiv(columns, tile.columns)
    with on_device_of(x):
        product_kernel[(groups.tiles.shape[0] * parts,)](
            x, x.stride(0), x if rows is None else rows, weight, strides[0], w_n, w_k, *_low(low, x),
            x if bias is None else bias, y, groups.tiles, groups.edges, columns, depth, parts,
            GATHER=rows is not None, LOW=low is not None, R=1 if low is None else int(low.wide.shape[1]),
            BIAS=bias is not None, EVEN_K=depth % tile.depth == 0, EVEN_N=columns % tile.columns == 0,
            ACC=triton_dtype(x.dtype), DOT=triton_store_dtype(x.dtype), BM=groups.rows_a_tile, BN=tile.columns,
            BK=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return rounded(y, x.dtype)


def _low(low: Low | None, x: Tensor) -> tuple[Tensor, Tensor, int]:
    return (x, x, 0) if low is None else (low.thin, low.wide, low.wide.stride(1))


def _tile_of(table: Mapping[int, _Tile], groups: Groups, dtype: torch.dtype, matrices: int = 1) -> _Tile:
    """The tile for a GPU's shared memory. Float32 takes fewer columns and no pipeline: it has no tensor cores here."""
    if interpreting():
        return _SMALL
    tile = table[groups.rows_a_tile]
    if dtype.itemsize > 2:
        return _Tile(max(tile.columns // 4, 16), 32, tile.warps, 1)
    if groups.shared < _WIDE_TILES and groups.rows_a_tile >= 64:  # and operands come from registers there
        tile = _Tile(tile.columns // 2, 32, tile.warps, 4)
    while (
        tile.stages > 1
        and tile.stages * tile.depth * (groups.rows_a_tile + matrices * tile.columns) * 2 > groups.shared
    ):
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def grouped_unit(
    x: Tensor, weight: Tensor, groups: Groups, unit: Unit, *, low: Low | None = None, bias: Tensor | None = None,
    interleaved: bool = False, keep: bool = True,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """([g | u] (M, 2F) unless not ``keep``, their unit (M, F)) of tokens x (T, K) by weight (G, 2F, K) of any strides.

    ``interleaved``: even columns are the gate's and odd ones the up's, of the weight, the bias and what is kept.
    """
    if groups.tiles is None:
        both = _product_torch(x, weight, groups, groups.token, False, low, bias)
        return (both if keep else None), unit_reference(both, unit, interleaved=interleaved)
    pairs, depth, width = groups.token.shape[0], int(x.shape[1]), int(weight.shape[1]) // 2
    both = torch.empty((pairs, 2 * width) if keep else (0,), dtype=store_dtype(x.dtype), device=x.device)
    h = torch.empty((pairs, width), dtype=store_dtype(x.dtype), device=x.device)
    # Interleaved, a tile has so many columns of gate and up together.
    tile = _tile_of(_PRODUCT, groups, x.dtype) if interleaved else _tile_of(_UNIT, groups, x.dtype, 2)
    columns = 2 * width if interleaved else width
    parts = triton.cdiv(columns, tile.columns)
    kernel = interleaved_unit_kernel if interleaved else unit_kernel
    with on_device_of(x):
        kernel[(groups.tiles.shape[0] * parts,)](
            x, x.stride(0), groups.token, weight, *weight.stride(), *_low(low, x), x if bias is None else bias, both,
            h, groups.tiles, groups.edges, width, depth, parts,
            UNIT=unit, LOW=low is not None, R=1 if low is None else int(low.wide.shape[1]), BIAS=bias is not None,
            EVEN_K=depth % tile.depth == 0, EVEN_N=columns % tile.columns == 0, KEEP=keep,
            ACC=triton_dtype(x.dtype), DOT=triton_store_dtype(x.dtype), BM=groups.rows_a_tile, BN=tile.columns,
            BK=tile.depth, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return (rounded(both, x.dtype) if keep else None), rounded(h, x.dtype)


def grouped_thin(x: Tensor, factor: Tensor, groups: Groups, *, rows: Tensor | None = None) -> Tensor:
    """(M, R): x (M or T, K) by factor (G, R, K)."""
    if groups.tiles is None:
        return _product_torch(x, factor, groups, rows, False, None, None)
    rank, depth = int(factor.shape[1]), int(x.shape[1])
    y = torch.empty((groups.token.shape[0], rank), dtype=store_dtype(x.dtype), device=x.device)
    deep = 32 if interpreting() else 128 if x.dtype.itemsize == 2 else 32
    with on_device_of(x):
        thin_kernel[(groups.tiles.shape[0],)](
            x, x.stride(0), x if rows is None else rows, factor, y, groups.tiles, groups.edges, depth,
            GATHER=rows is not None, R=rank, EVEN_K=depth % deep == 0, ACC=triton_dtype(x.dtype),
            DOT=triton_store_dtype(x.dtype), BM=groups.rows_a_tile, BK=deep, STAGES=1 if interpreting() else 3,
            num_warps=4,
        )  # fmt: skip
    return rounded(y, x.dtype)


def grouped_outer(thin: Tensor, wide: Tensor, groups: Groups, *, rows: Tensor | None = None) -> Tensor:
    """(G, R, N) in the accumulation dtype: thin (M, R), wide (M or T, N). A group without rows has zeros."""
    dtype = accumulate_dtype(wide.dtype)
    rank, columns = int(thin.shape[1]), int(wide.shape[1])
    if groups.tiles is None:
        return _outer_torch(thin, wide, groups, None, rows)
    out = torch.empty((groups.count, rank, columns), dtype=dtype, device=wide.device)
    block = 32 if interpreting() else 64
    with on_device_of(wide):
        outer_kernel[(groups.count, triton.cdiv(columns, block))](
            thin, wide, wide.stride(0), wide if rows is None else rows, groups.edges, out, columns,
            GATHER=rows is not None, R=rank, EVEN_N=columns % block == 0, ACC=triton_dtype(wide.dtype),
            DOT=triton_store_dtype(wide.dtype), BM=32 if interpreting() else 64, BN=block,
            STAGES=1 if interpreting() else 4, num_warps=4,
        )  # fmt: skip
    return out


def grouped_weight(
    left: Tensor, right: Tensor, groups: Groups, *, left_rows: Tensor | None = None, right_rows: Tensor | None = None,
    dtype: torch.dtype | None = None, tile: WeightTile | None = None,
) -> Tensor:  # fmt: skip
    """(G, A, B) in ``dtype``, or the accumulation dtype: left (M or T, A), right (M or T, B), each read at its rows. A
    group without rows has zeros.
    """
    a, b, wide = int(left.shape[1]), int(right.shape[1]), accumulate_dtype(left.dtype)
    dtype = wide if dtype is None else dtype
    if groups.tiles is None:
        return _outer_torch(left, right, groups, left_rows, right_rows).to(dtype)
    tile = tile or _weight_tile(groups, left.dtype)
    parts_a, parts_b = triton.cdiv(a, tile.left), triton.cdiv(b, tile.right)
    out = torch.empty((groups.count, a, b), dtype=store_dtype(dtype), device=left.device)
    with on_device_of(left):
        weight_kernel[(groups.count * parts_a * parts_b,)](
            left, left.stride(0), left if left_rows is None else left_rows, right, right.stride(0),
            right if right_rows is None else right_rows, groups.edges, out, a, b, parts_a, parts_b,
            GATHER_LEFT=left_rows is not None, GATHER_RIGHT=right_rows is not None, EVEN_A=a % tile.left == 0,
            EVEN_B=b % tile.right == 0, ACC=triton_dtype(left.dtype), DOT=triton_store_dtype(left.dtype),
            BM=tile.depth, BA=tile.left, BB=tile.right, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip
    return rounded(out, dtype)


def _weight_tile(groups: Groups, dtype: torch.dtype) -> WeightTile:
    """See :func:`_tile_of`."""
    if interpreting():
        return WeightTile(32, 32, 32, 4, 1)
    if dtype.itemsize > 2:
        return WeightTile(64, 64, 32, 4, 1)
    return _WEIGHT if groups.shared >= _WIDE_TILES else WeightTile(64, 64, 32, 4, 3)


def grouped_sums(x: Tensor, groups: Groups, *, rows: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """(G, N) in the accumulation dtype: the sum of a group's rows of x (M or T, N), times weights (M,) of the rows."""
    thin = torch.zeros((groups.token.shape[0], 16), dtype=x.dtype, device=x.device)  # the least that a dot takes
    thin[:, 0] = 1.0 if weights is None else weights.to(x.dtype)
    return grouped_outer(thin, x, groups, rows=rows)[:, 0]


class UnitGrads(NamedTuple):
    """d[g | u] (M, 2F), weight * h (M, F) or None, and the gradient of the router's weights (T, P), accumulated."""

    both: Tensor
    weighted_h: Tensor | None
    weights: Tensor


def unit_backward(
    dh: Tensor, both: Tensor, weights: Tensor, groups: Groups, unit: Unit, *, interleaved: bool = False, want_h: bool,
    overwrite: bool = False,
) -> UnitGrads:  # fmt: skip
    """From ``dh`` (M, F), of the unweighted output, which is overwritten; ``both`` (M, 2F) too with ``overwrite``.

    Gate and up are laid out in d[g | u] as they are in ``both``.
    """
    pairs, width = dh.shape
    d_weights = torch.empty(weights.shape, dtype=accumulate_dtype(dh.dtype), device=dh.device)
    if groups.tiles is None:
        scale = weights.reshape(-1)[groups.pair.long(), None]
        with torch.enable_grad():
            leaf = both.detach().requires_grad_()
            h = unit_reference(leaf, unit, interleaved=interleaved)
        (d,) = torch.autograd.grad(h, leaf, dh * scale.to(dh.dtype))
        d_weights.view(-1)[groups.pair.long()] = (dh * h.detach()).sum(1).to(d_weights.dtype)
        return UnitGrads(d, h.detach() * scale.to(h.dtype) if want_h else None, d_weights)
    stored = store_dtype(dh.dtype)
    in_place = stored == dh.dtype
    d_both = both if overwrite and in_place else torch.empty((pairs, 2 * width), dtype=stored, device=dh.device)
    wh = dh if in_place else torch.empty((pairs, width), dtype=stored, device=dh.device)
    block = triton.next_power_of_2(width)
    with on_device_of(dh):
        unit_backward_kernel[(pairs,)](
            dh, both, groups.pair, weights, d_both, wh, d_weights, width,
            UNIT=unit, INTERLEAVED=interleaved, WANT_H=want_h, ACC=triton_dtype(dh.dtype), BN=block,
            num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
    return UnitGrads(rounded(d_both, dh.dtype), rounded(wh, dh.dtype) if want_h else None, d_weights)


def gathered_sum(y: Tensor, groups: Groups, *, weights: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """(T, N): the sum of each token's rows of y (M, N), times weights (T, P), and ``added`` (T, N), in the dtype that
    both promote to.
    """
    tokens, top = groups.place.shape
    columns = int(y.shape[1])
    wide = y.dtype if added is None else torch.promote_types(y.dtype, added.dtype)
    if groups.tiles is None:
        dtype = accumulate_dtype(y.dtype)
        rows = y[groups.place.long()].to(dtype)
        if weights is not None:
            rows = rows * weights.to(dtype)[..., None]
        total = rows.sum(1)
        return (total if added is None else total + added.to(dtype)).to(wide)
    out = torch.empty((tokens, columns), dtype=store_dtype(wide), device=y.device)
    block = 64 if interpreting() else min(triton.next_power_of_2(columns), 2048)
    with on_device_of(y):
        sum_kernel[(tokens, triton.cdiv(columns, block))](
            y, groups.place, y if weights is None else weights, y if added is None else added, out, columns,
            TOP=top, WEIGHTED=weights is not None, ADDS=added is not None, ACC=triton_dtype(y.dtype), BN=block,
            num_warps=4,
        )  # fmt: skip
    return rounded(out, wide)


def turned(x: Tensor, out: Tensor, scale: float, *, kernels: bool) -> Tensor:
    """``out`` (C, R, A) = scale * x (A, R, C) with the outer dimensions changed over, rounded to ``out``'s dtype."""
    if not kernels or (interpreting() and out.dtype != accumulate_dtype(out.dtype)):
        return torch.mul(x.permute(2, 1, 0), scale, out=out)
    rows, ranks, columns = x.shape
    block = 32
    with on_device_of(x):
        turn_kernel[(triton.cdiv(rows, block), triton.cdiv(columns, block), ranks)](
            x, x.stride(0), x.stride(1), out, out.stride(0), out.stride(1), rows, columns, scale,
            ACC=triton_dtype(x.dtype), BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out


def _product_torch(
    x: Tensor, weight: Tensor, groups: Groups, rows: Tensor | None, transposed: bool, low: Low | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    edges = groups.edges.tolist()
    parts = []
    for group, (first, end) in enumerate(pairwise(edges)):
        taken = x[first:end] if rows is None else x[rows[first:end].long()]
        y = taken @ (weight[group] if transposed else weight[group].T)
        y = y if low is None else y + low.thin[first:end] @ low.wide[group]
        parts.append(y if bias is None else y + bias[group])
    return torch.cat(parts)


def _outer_torch(
    left: Tensor, right: Tensor, groups: Groups, left_rows: Tensor | None, right_rows: Tensor | None
) -> Tensor:
    dtype = accumulate_dtype(right.dtype)
    a, b = (x if at is None else x[at.long()] for x, at in ((left, left_rows), (right, right_rows)))
    return torch.stack([a[i:j].to(dtype).T @ b[i:j].to(dtype) for i, j in pairwise(groups.edges.tolist())])


def unit_reference(both: Tensor, unit: Unit, *, interleaved: bool = False) -> Tensor:
    """The gated unit (..., F) of [g | u] (..., 2F), in plain torch, differentiable: ``ftkernels.primitives.gated_unit``
    has the formula of ``clamped``. Float32 inside (float64 for float64), one rounding.
    """
    g, u = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, dim=-1)
    if unit != "clamped":
        return glu_reference(g, u, unit)
    acc, limit = accumulate_dtype(both.dtype), CLAMPED_LIMIT.value
    gate, up = g.to(acc).clamp(max=limit), u.to(acc).clamp(-limit, limit)
    return (gate * torch.sigmoid(CLAMPED_SLOPE.value * gate) * (up + 1)).to(both.dtype)
