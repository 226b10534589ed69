"""The gradients of a group's adapters: products over all rows whose one operand is as thin as the adapters' rank.

Legend: M rows, I input features, O output features of one projection, N = sum O, P projections, K their padded rank,
S programs that share the rows. For dy (M, N) and xa (M, P * K), for x (M, I) and dxa (M, P * K):

    dB_p = dy_p.T @ xa_p                     (O_p, K)
    dA   = scaling * (dxa.T @ x) * w         (P * K, I); w: the weight of a norm in front, or nothing

Each reads its wide operand once, and nothing else of any size: the memory's speed bounds it, which GEMM libraries do
not reach at a few columns. A program takes a block of columns and a share of the rows; its sum is float32, and the S
sums of an element are added in their order by a second kernel, which multiplies by what is in front. Both products are
one launch each of the two kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import Tile, accumulate_dtype, gpu_of, on_device_of, tile_for, triton_dtype, triton_store_dtype
from ftkernels.limits import NormForm

#: Projections of one group, and columns of a thin operand, that the kernel takes.
MOST_PROJECTIONS, MOST_COLUMNS = 3, 128
_BLOCK = 1024
# Elements of dy from which on one dB alone is no slower than its GEMM: on an H200, at 512 to 8192 rows.
_FEWEST_ALONE = 2**24


class OfB(NamedTuple):
    """What dB is made of: dy (M, N) and xa (M, P * K), and each projection's O."""

    dy: Tensor
    xa: Tensor
    out_features: Sequence[int]


class OfA(NamedTuple):
    """What dA is made of: x (M, I) and dxa (M, P * K), and what multiplies the product."""

    x: Tensor
    dxa: Tensor
    scaling: float = 1.0
    norm_weight: Tensor | None = None
    norm_form: NormForm | None = None


class ThinGrads(NamedTuple):
    """dB (N, K) and dA (P * K, I), contiguous, in the accumulation dtype; None of what was not asked for."""

    b: Tensor | None
    a: Tensor | None


@triton.jit
def _summed(
    wide_ptr, wide_stride, thin_ptr, thin_stride, column, columns, first, rows, T, PADDED: tl.constexpr,
    EVEN: tl.constexpr, ACC: tl.constexpr, DOT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """wide.T @ thin (BN, PADDED) over ``rows`` rows from ``first`` on; columns past ``columns``, and past T, are 0."""
    n = tl.arange(0, BN)
    t = tl.arange(0, PADDED)
    m = tl.arange(0, BM)[:, None]
    n_ok = (n[None, :] < columns) | EVEN  # a constant where the tiles fit
    t_ok = t[None, :] < T
    wide = wide_ptr + first.to(tl.int64) * wide_stride + column
    thin = thin_ptr + first.to(tl.int64) * thin_stride
    wide_off = m * wide_stride + n[None, :]
    thin_off = m * thin_stride + t[None, :]
    total = tl.full((BN, PADDED), 0.0, ACC)
    for block in tl.range(0, tl.cdiv(rows, BM), num_stages=STAGES):
        left = rows - block * BM
        w = tl.load(wide + tl.cast(block, tl.int64) * BM * wide_stride + wide_off, mask=n_ok & (m < left), other=0.0)
        v = tl.load(thin + tl.cast(block, tl.int64) * BM * thin_stride + thin_off, mask=t_ok & (m < left), other=0.0)
        total += tl.dot(tl.trans(w.to(DOT)), v.to(DOT), input_precision="ieee")
    return total


@triton.jit
def _thin_kernel(
    dy_ptr,
    dy_stride,
    xa_ptr,
    xa_stride,
    b_ptr,
    first_out,
    second_out,
    third_out,
    b_blocks,
    b_rows,
    b_programs,
    x_ptr,
    x_stride,
    dxa_ptr,
    dxa_stride,
    a_ptr,
    width,
    a_blocks,
    a_rows,
    M,
    HAS_B: tl.constexpr,
    HAS_A: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    PADDED: tl.constexpr,
    EVEN: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """b_ptr is (splits, N, K), a_ptr (splits, T, I); the first ``b_programs`` programs make dB's."""
    program = tl.program_id(0)
    n = tl.arange(0, BN)[:, None]
    if HAS_B and program < b_programs:
        block = program % b_blocks
        split = program // b_blocks
        blocks0 = tl.cdiv(first_out, BN)
        blocks1 = tl.cdiv(second_out, BN)
        later = (block >= blocks0).to(tl.int32)
        last = (block >= blocks0 + blocks1).to(tl.int32)
        within = (block - later * blocks0 - last * blocks1) * BN  # its projection's column
        column = within + later * first_out + last * second_out
        features = tl.where(last > 0, third_out, tl.where(later > 0, second_out, first_out))
        first = split * b_rows
        b_sum = _summed(
            dy_ptr, dy_stride, xa_ptr + (later + last) * K, xa_stride, column, features - within, first,
            tl.minimum(b_rows, M - first), K, K, EVEN, ACC, DOT, BM, BN, STAGES,
        )  # fmt: skip
        every = tl.cast(first_out + second_out + third_out, tl.int64)
        b_at = b_ptr + (split * every + column) * K + (n * K + tl.arange(0, K)[None, :])
        tl.store(b_at, b_sum, mask=n < features - within)
    elif HAS_A:
        a_program = program - b_programs
        a_column = (a_program % a_blocks) * BN
        a_split = a_program // a_blocks
        a_first = a_split * a_rows
        a_sum = _summed(
            x_ptr, x_stride, dxa_ptr, dxa_stride, a_column, width - a_column, a_first,
            tl.minimum(a_rows, M - a_first), T, PADDED, EVEN, ACC, DOT, BM, BN, STAGES,
        )  # fmt: skip
        t = tl.arange(0, PADDED)[None, :]
        a_at = a_ptr + tl.cast(a_split, tl.int64) * T * width + a_column + (t * width + n)
        tl.store(a_at, a_sum, mask=(n < width - a_column) & (t < T))


@triton.jit
def _added(partial_ptr, at, mask, count, splits, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """The sum over (splits, count) of the elements ``at``, in the order of the splits."""
    total = tl.full((BLOCK,), 0.0, ACC)
    for split in range(splits):
        total += tl.load(partial_ptr + tl.cast(split, tl.int64) * count + at, mask=mask, other=0.0)
    return total


@triton.jit
def _finish_kernel(
    b_partial_ptr,
    b_ptr,
    b_count,
    b_splits,
    b_programs,
    a_partial_ptr,
    a_ptr,
    a_count,
    a_splits,
    width,
    scaling,
    weight_ptr,
    FORM: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    if program < b_programs:
        at = program * BLOCK + tl.arange(0, BLOCK)
        mask = at < b_count
        tl.store(b_ptr + at, _added(b_partial_ptr, at, mask, b_count, b_splits, ACC, BLOCK), mask=mask)
    else:
        at = (program - b_programs) * BLOCK + tl.arange(0, BLOCK)
        mask = at < a_count
        total = _added(a_partial_ptr, at, mask, a_count, a_splits, ACC, BLOCK) * tl.cast(scaling, ACC)
        if FORM != "none":
            w = tl.load(weight_ptr + at % width, mask=mask, other=0.0).to(ACC)
            total *= 1.0 + w if FORM == "gemma" else w
        tl.store(a_ptr + at, total, mask=mask)


def thin_tile(shared_memory: int, widest: int, element_bytes: int) -> Tile:
    """The tile where a program can have ``shared_memory`` bytes, and ``widest`` columns of a thin operand."""
    return tile_for(
        "thin_products", lambda t: t.stages * t.rows * (t.columns + widest) * element_bytes <= shared_memory
    )


def takes(of_b: OfB | None, of_a: OfA | None) -> bool:
    """True where the kernel takes these operands, and is no slower than GEMMs."""
    if of_b is not None and len(of_b.out_features) > MOST_PROJECTIONS:
        return False
    if of_a is None:
        return of_b is not None and (len(of_b.out_features) > 1 or of_b.dy.numel() >= _FEWEST_ALONE)
    return of_a.dxa.shape[1] <= MOST_COLUMNS


def thin_products(of_b: OfB | None, of_a: OfA | None, rank: int, *, tile: Tile | None = None) -> ThinGrads:
    """The module docstring's products, of operands in one dtype, whose rows may have any stride. ``rank``: K.

    At most ``MOST_PROJECTIONS`` projections, and ``MOST_COLUMNS`` columns of dxa.
    """
    some = of_b.dy if of_b is not None else of_a.x if of_a is not None else None
    if some is None:
        return ThinGrads(None, None)
    acc, count = accumulate_dtype(some.dtype), some.shape[0]
    columns = 0 if of_a is None else of_a.dxa.shape[1]
    padded = triton.next_power_of_2(max(columns, 16))
    tile = tile or thin_tile(gpu_of(some.device).shared_memory_bytes, padded, some.element_size())
    outs = [0, 0, 0] if of_b is None else [*of_b.out_features, 0, 0][:MOST_PROJECTIONS]
    width = 0 if of_a is None else of_a.x.shape[1]
    b_blocks, a_blocks = sum(triton.cdiv(o, tile.columns) for o in outs), triton.cdiv(width, tile.columns)
    b_rows, b_splits = _share(count, b_blocks, tile)
    a_rows, a_splits = _share(count, a_blocks, tile)
    b_partial = torch.empty((b_splits, sum(outs), rank), dtype=acc, device=some.device)
    a_partial = torch.empty((a_splits, columns, width), dtype=acc, device=some.device)
    dy, xa = (some, some) if of_b is None else (_rows(of_b.dy), _rows(of_b.xa))
    x, dxa = (some, some) if of_a is None else (_rows(of_a.x), _rows(of_a.dxa))
    if count and b_blocks + a_blocks:
        with on_device_of(some):
            _thin_kernel[(b_blocks * b_splits + a_blocks * a_splits,)](
                dy,
                dy.stride(0),
                xa,
                xa.stride(0),
                b_partial,
                *outs,
                max(b_blocks, 1),
                b_rows,
                b_blocks * b_splits,
                x,
                x.stride(0),
                dxa,
                dxa.stride(0),
                a_partial,
                width,
                max(a_blocks, 1),
                a_rows,
                count,
                HAS_B=of_b is not None,
                HAS_A=of_a is not None,
                K=rank,
                T=columns,
                PADDED=padded,
                EVEN=all(n % tile.columns == 0 for n in (*outs, width)),
                ACC=triton_dtype(some.dtype),
                DOT=triton_store_dtype(some.dtype),
                BM=tile.rows,
                BN=tile.columns,
                STAGES=tile.stages,
                num_warps=tile.warps,
            )
    else:
        b_partial.zero_()
        a_partial.zero_()
    return _finished(of_b, of_a, b_partial, a_partial)


def _finished(of_b: OfB | None, of_a: OfA | None, b_partial: Tensor, a_partial: Tensor) -> ThinGrads:
    """Adds the partial sums (S, N, K) and (S, T, I), and multiplies dA by what is in front of it."""
    plain = of_a is None or (a_partial.shape[0] == 1 and of_a.scaling == 1.0 and of_a.norm_weight is None)
    b = b_partial[0] if b_partial.shape[0] == 1 else torch.empty_like(b_partial[0])
    a = a_partial[0] if plain else torch.empty_like(a_partial[0])
    b_count = b.numel() if of_b is not None and b_partial.shape[0] > 1 else 0
    a_count = 0 if plain else a.numel()
    b_programs = triton.cdiv(b_count, _BLOCK)
    weight = None if of_a is None else of_a.norm_weight
    if b_count + a_count:
        with on_device_of(b):
            _finish_kernel[(b_programs + triton.cdiv(a_count, _BLOCK),)](
                b_partial,
                b,
                b_count,
                b_partial.shape[0],
                b_programs,
                a_partial,
                a,
                a_count,
                a_partial.shape[0],
                a.shape[1] or 1,
                1.0 if of_a is None else of_a.scaling,
                a if weight is None else weight,
                FORM="none" if of_a is None or weight is None else of_a.norm_form or "llama",
                ACC=triton_dtype(b.dtype),
                BLOCK=_BLOCK,
                num_warps=4,
            )
    return ThinGrads(None if of_b is None else b, None if of_a is None else a)


def _share(rows: int, blocks: int, tile: Tile) -> tuple[int, int]:
    """(rows of a program, programs that share the rows), where ``blocks`` blocks of columns take a program each."""
    steps = max(triton.cdiv(rows, tile.rows), 1)
    splits = min(steps, max(1, tile.programs // max(blocks, 1)))
    each = triton.cdiv(steps, splits)
    return each * tile.rows, triton.cdiv(steps, each)


def _rows(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def edges(sizes: Sequence[int]) -> list[slice]:
    """Slices of so many rows, one behind the other."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return [slice(lo, hi) for lo, hi in pairwise(ends)]


def thin_products_reference(of_b: OfB | None, of_a: OfA | None, rank: int) -> ThinGrads:
    """The same in plain torch, in the accumulation dtype throughout."""
    b = a = None
    if of_b is not None:
        dy, xa = (t.to(accumulate_dtype(t.dtype)) for t in (of_b.dy, of_b.xa))
        parts = [
            dy[:, rows].t() @ xa[:, index * rank : (index + 1) * rank]
            for index, rows in enumerate(edges(of_b.out_features))
        ]
        b = torch.cat(parts)
    if of_a is not None:
        x, dxa = (t.to(accumulate_dtype(t.dtype)) for t in (of_a.x, of_a.dxa))
        a = dxa.t() @ x * of_a.scaling
        if of_a.norm_weight is not None:
            a = a * (of_a.norm_weight.to(a.dtype) + (1.0 if of_a.norm_form == "gemma" else 0.0))
    return ThinGrads(b, a)
