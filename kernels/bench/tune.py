"""Times the tiles that kernels choose between, and prints the fastest of each kernel and the one in use.

    python kernels/bench/tune.py --model llama3.1-8b
    python kernels/bench/tune.py --model gemma2-9b --only attention
    python kernels/bench/tune.py --only delta_                        # the gated delta rule, of Qwen3.5-9B's heads
    TRITON_INTERPRET=1 python kernels/bench/tune.py --device cpu --only norm_forward      # does it run at all

The tables in ``ftkernels`` (``device.py``, ``attention_config.py``, ``delta_rule_forward.py``, ``int8_product.py``,
``limits.py``) are then edited by hand: nothing is searched for while training. Every kernel has a process of its own,
and a new one from the next tile on when a tile brings it down: an illegal access spoils a CUDA context for good. Tiles
that fail are named, and so are tiles of attention and of the delta rule whose results are not those of the tile in use.
All kernels compile at once first, then they are timed one after the other. Rates are TB/s over the bytes that have to
move; of products TFLOP/s.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from attention import KERNELS as ATTENTION_KERNELS
from attention import Attention, tile_of
from common import Table, parser
from ftkernels import (
    cross_entropy,
    gemm,
    glu,
    grouped,
    int8_product,
    qkv_norm_rope,
    qkv_parts,
    rms_norm,
    thin_products,
)
from ftkernels.attention_config import AttentionTile
from ftkernels.bitlinear import quantize_int8_triton
from ftkernels.delta_rule_backward import Kept, gradients, scan_back
from ftkernels.delta_rule_forward import Chunks, DeltaInputs, DeltaTile, DeltaTiles, delta_tiles, prepare, scan
from ftkernels.device import Tile
from ftkernels.grouped import WeightTile
from ftkernels.int8_product import ProductTile
from ftkernels.linear_log_prob import linear_log_prob
from ftkernels.ternary import ternarise
from timing import SHAPES, SMALL_SHAPES, Clock, Maker, Shape, require_interpreter, shape_of, start
from torch import Tensor
from triton.runtime.errors import OutOfResources, PTXASError

#: A tile that the compiler refuses, or that does not fit the GPU, is no candidate.
UNUSABLE = (triton.CompilationError, OutOfResources, PTXASError)
_RESTARTS = 4


class Case(NamedTuple):
    """Work of a launch (bytes, or operations of a product), the launch, and the tiles to try."""

    work: float
    launch: Callable[[Any], object]
    tiles: list[Any]


# queries, keys, warps, stages, TMA
ATTENTION_TILES: dict[tuple[str, int], list[tuple[int, int, int, int, bool]]] = {
    ("fwd", 512): [
        (64, 32, 8, 2, True), (64, 64, 8, 1, True), (64, 32, 4, 2, True), (64, 16, 8, 3, True), (64, 32, 8, 2, False),
        (128, 32, 16, 1, True), (32, 64, 8, 1, True), (128, 32, 8, 1, True), (128, 16, 16, 2, True),
    ],
    ("dq", 512): [
        (64, 16, 8, 2, True), (64, 32, 8, 1, True), (64, 16, 8, 1, True), (32, 32, 8, 2, True), (32, 64, 8, 1, True),
        (32, 32, 4, 2, True), (64, 16, 8, 2, False), (64, 32, 8, 1, False), (64, 16, 16, 2, True),
    ],
    ("dk", 512): [
        (16, 64, 8, 2, True), (32, 64, 8, 1, True), (32, 32, 8, 2, True), (64, 32, 8, 1, True), (16, 64, 4, 2, True),
        (32, 32, 4, 2, True), (16, 64, 8, 2, False), (16, 64, 16, 2, True), (32, 64, 16, 1, True),
    ],
    ("dv", 512): [
        (32, 64, 8, 2, True), (64, 64, 8, 1, True), (16, 64, 8, 3, True), (32, 32, 8, 2, True), (32, 64, 4, 2, True),
        (32, 64, 8, 2, False), (32, 64, 8, 1, True), (16, 64, 8, 2, True), (32, 64, 16, 2, True),
    ],
    ("fwd", 256): [
        (128, 64, 8, 2, True), (128, 64, 8, 2, False), (128, 32, 8, 3, True), (128, 32, 8, 4, True),
        (64, 64, 4, 2, True), (64, 64, 4, 3, True), (128, 64, 8, 1, True),
    ],
    ("dq", 256): [
        (128, 32, 8, 3, False), (128, 32, 8, 3, True), (128, 32, 8, 2, True), (64, 64, 4, 2, True),
        (64, 64, 4, 2, False), (64, 64, 8, 2, True), (64, 32, 4, 3, True), (64, 32, 4, 4, True), (128, 64, 8, 1, True),
    ],
    ("dk", 256): [
        (64, 64, 4, 2, True), (64, 64, 4, 2, False), (32, 128, 8, 2, True), (32, 128, 8, 2, False),
        (64, 64, 8, 2, True), (64, 64, 8, 2, False), (32, 64, 4, 3, True), (32, 64, 4, 4, True), (32, 64, 4, 2, False),
        (64, 128, 8, 1, True),
    ],
    ("dv", 256): [
        (64, 128, 8, 2, True), (64, 128, 8, 2, False), (32, 128, 8, 3, True), (32, 128, 8, 4, True),
        (64, 64, 4, 2, True), (64, 64, 4, 3, True), (64, 128, 8, 1, True),
    ],
    ("dkv", 256): [(32, 64, 8, 2, True), (32, 64, 8, 3, True)],
    ("fwd", 128): [
        (128, 128, 8, 2, True), (128, 128, 8, 2, False), (128, 64, 8, 3, True), (128, 64, 8, 2, True),
        (128, 64, 4, 3, True), (64, 64, 4, 3, True), (64, 128, 4, 2, True), (128, 128, 8, 3, False),
    ],
    ("dq", 128): [
        (128, 64, 8, 2, True), (128, 64, 8, 3, True), (128, 64, 8, 2, False), (64, 64, 4, 3, True),
        (64, 64, 4, 2, True), (64, 128, 4, 2, True), (128, 128, 8, 1, True), (128, 32, 4, 3, True),
    ],
    ("dkv", 128): [
        (64, 128, 8, 2, True), (64, 128, 8, 2, False), (64, 64, 4, 2, True), (64, 64, 4, 2, False),
        (32, 128, 8, 3, True), (64, 128, 8, 3, True), (32, 64, 4, 3, True), (32, 128, 4, 2, True),
    ],
    ("dk", 128): [(64, 128, 8, 2, True), (64, 128, 8, 3, True), (64, 64, 4, 2, True), (64, 64, 4, 3, True)],
    ("dv", 128): [(64, 128, 8, 2, True), (128, 128, 8, 2, True), (64, 64, 4, 3, True), (64, 128, 8, 3, True)],
}  # fmt: skip


def _flat() -> list[Any]:
    return [Tile(m, n, w) for m, n, w in product((1, 4, 16), (256, 512, 1024), (4, 8)) if 1024 <= m * n <= 8192]


def _dots() -> list[Any]:
    tiles = product(
        ((32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 32, 4)),
        (2, 3),
        (256, 512, 1024),
    )
    return [Tile(m, n, w, s, p) for (m, n, w), s, p in tiles]


def _widths(rows: tuple[int, ...]) -> list[Any]:
    """Columns are those of the whole row; only rows a program and warps are chosen."""
    return [Tile(m, 0, w) for m, w in product(rows, (4, 8, 16))]


def glu_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """The plain unit."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    return Case(6 * gate.numel(), lambda t: glu.glu_forward(gate, up, shape.activation, tile=t), _flat())


def glu_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """The plain unit's backward, h included."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    dh = make.new(shape.tokens, shape.inner)
    return Case(
        12 * dh.numel(),
        lambda t: glu.glu_backward(dh, gate, up, shape.activation, want_h=True, tile=t),
        _flat(),
    )


def _low(make: Maker, shape: Shape, rank: int) -> glu.GluLowRank:
    rows, inner = shape.tokens, shape.inner
    return glu.GluLowRank(make.new(rows, 2 * rank), make.new(2 * inner, rank), make.new(rank, inner))


def glu_forward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """The case with the adapters' terms and their sums."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    low = _low(make, shape, rank)
    return Case(6 * gate.numel(), lambda t: glu.glu_forward(gate, up, shape.activation, low, tile=t), _dots())


def glu_backward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """The case with the adapters' terms and their sums, h included."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    low, dya, dh = _low(make, shape, rank), make.new(shape.tokens, rank), make.new(shape.tokens, shape.inner)

    def launch(tile: Tile | None) -> object:
        return glu.glu_backward(dh, gate, up, shape.activation, lowrank=low, dya=dya, want_h=True, tile=tile)

    return Case(12 * dh.numel(), launch, _dots())


def add(make: Maker, shape: Shape, rank: int) -> Case:
    """``y + xa @ b.T + residual``."""
    y, xa = make.new(shape.tokens, shape.hidden), make.new(shape.tokens, rank)
    b, residual = make.new(shape.hidden, rank), make.new(shape.tokens, shape.hidden)
    tiles = [Tile(m, n, w) for m, n, w in product((16, 32, 64), (64, 128, 256), (4, 8)) if m * n <= 8192]
    return Case(6 * y.numel(), lambda t: gemm.lowrank_add(y, xa, b, residual, triton_kernel=True, tile=t), tiles)


def _rotary(make: Maker, shape: Shape) -> qkv_parts.Rotary:
    cos = make.new(1, shape.seq_len, shape.head_dim)
    return qkv_parts.Rotary(cos, cos, shape.q_heads, shape.k_heads, shape.head_dim)


def _turns() -> list[Any]:
    """Columns are heads of one program. Whole tiles of 64 rows spill, and so do programs of a single head."""
    return [Tile(m, n, w) for m, n, w in product((16, 32), (2, 4, 8), (4, 8))]


def qkv_rope_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """In place on the projection's output."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    y, xa, b = make.new(shape.tokens, width, scale=0.1), make.new(shape.tokens, 3 * rank), make.new(width, rank)
    rotary = _rotary(make, shape)
    return Case(4 * y.numel(), lambda t: qkv_norm_rope.qkv_rope_forward(y, xa, b, rotary, tile=t), _turns())


def qkv_rope_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """Gradients as attention leaves them: (B, S, heads, D) seen as (B, heads, S, D)."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    dq, dk, dv = (make.new(shape.batch, shape.seq_len, n, shape.head_dim).transpose(1, 2) for n in sizes)
    b, rotary = make.new(width, rank), _rotary(make, shape)
    return Case(
        4 * shape.tokens * width,
        lambda t: qkv_norm_rope.qkv_rope_backward(dq, dk, dv, b, rotary, dq.dtype, tile=t),
        _turns(),
    )


def qkv_rope_backward_by_head(make: Maker, shape: Shape, rank: int) -> Case:
    """Gradients that lie a head after another, as own attention kernels leave them."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    dq, dk, dv = (make.new(shape.batch, n, shape.seq_len, shape.head_dim) for n in sizes)
    b, rotary = make.new(width, rank), _rotary(make, shape)
    return Case(
        4 * shape.tokens * width,
        lambda t: qkv_norm_rope.qkv_rope_backward(dq, dk, dv, b, rotary, dq.dtype, tile=t),
        _turns(),
    )


def _norms(make: Maker, shape: Shape) -> qkv_parts.HeadNorms:
    weight = make.new(shape.head_dim)
    return qkv_parts.HeadNorms(weight, weight, 1e-6, shape.form)


def _thin_tiles() -> list[Any]:
    tiles = ((64, 128, 4, 3), (64, 128, 4, 4), (32, 128, 4, 4), (128, 64, 4, 3), (64, 64, 4, 4), (64, 256, 8, 3))
    return [Tile(*tile, programs) for tile in tiles for programs in (132, 264, 396)]


def thin_of_gate_and_up(make: Maker, shape: Shape, rank: int) -> Case:
    """The gradients of their adapters, behind a norm."""
    dy, x = make.new(shape.tokens, 2 * shape.inner), make.new(shape.tokens, shape.hidden)
    thin, weight = make.new(shape.tokens, 2 * rank), make.new(shape.hidden)
    of_b = thin_products.OfB(dy, thin, (shape.inner, shape.inner))
    of_a = thin_products.OfA(x, thin, 2.0, weight, shape.form)
    moved = dy.element_size() * (dy.numel() + x.numel())
    return Case(moved, lambda t: thin_products.thin_products(of_b, of_a, rank, tile=t), _thin_tiles())


def thin_of_down(make: Maker, shape: Shape, rank: int) -> Case:
    """The gradient of its A alone, as where the gated unit goes back."""
    of_a = thin_products.OfA(make.new(shape.tokens, shape.inner), make.new(shape.tokens, rank), 2.0)
    moved = of_a.x.element_size() * of_a.x.numel()
    return Case(moved, lambda t: thin_products.thin_products(None, of_a, rank, tile=t), _thin_tiles())


def qkv_norm_rope_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """Without adapters: reads q and k, writes them elsewhere."""
    heads = shape.q_heads + shape.k_heads
    y = make.new(shape.tokens, (heads + shape.k_heads) * shape.head_dim)
    rotary, norms = _rotary(make, shape), _norms(make, shape)
    return Case(
        4 * shape.tokens * heads * shape.head_dim,
        lambda t: qkv_norm_rope.qkv_norm_rope_forward(y, None, None, rotary, norms, tile=t),
        [Tile(8, 4, 4), *(Tile(m, n, w) for m, n, w in product((16, 32), (1, 2, 4, 8), (4, 8)))],
    )


def qkv_norm_rope_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """Without adapters, with the norms' own gradients."""
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    width = sum(sizes) * shape.head_dim
    dq, dk, dv = (make.new(shape.batch, shape.seq_len, n, shape.head_dim).transpose(1, 2) for n in sizes)
    y, rotary, norms = make.new(shape.tokens, width), _rotary(make, shape), _norms(make, shape)

    def launch(tile: Tile | None) -> object:
        return qkv_norm_rope.qkv_norm_rope_backward(
            (dq, dk, dv), y, None, rotary, norms, y.dtype, want_dw=True, tile=tile
        )

    moved = 2 * shape.tokens * (3 * width - shape.k_heads * shape.head_dim)
    return Case(moved, launch, [Tile(m, n, w) for m, n, w in product((8, 16, 32), (1, 2, 4, 8), (4, 8))])


def qkv_norm_rope_forward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """With adapters: y is written too."""
    heads = shape.q_heads + shape.k_heads
    width = (heads + shape.k_heads) * shape.head_dim
    y, xa, b = make.new(shape.tokens, width, scale=0.1), make.new(shape.tokens, 3 * rank), make.new(width, rank)
    rotary, norms = _rotary(make, shape), _norms(make, shape)
    return Case(
        2 * shape.tokens * (2 * width + heads * shape.head_dim),
        lambda t: qkv_norm_rope.qkv_norm_rope_forward(y, xa, b, rotary, norms, tile=t),
        [Tile(m, n, w, 3) for m, n, w in product((16, 32), (1, 2, 4, 8), (4, 8))],
    )


def qkv_norm_rope_backward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """With adapters and frozen norms."""
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    width = sum(sizes) * shape.head_dim
    dq, dk, dv = (make.new(shape.batch, shape.seq_len, n, shape.head_dim).transpose(1, 2) for n in sizes)
    y, b, rotary, norms = (
        make.new(shape.tokens, width),
        make.new(width, rank),
        _rotary(make, shape),
        _norms(make, shape),
    )

    def launch(tile: Tile | None) -> object:
        return qkv_norm_rope.qkv_norm_rope_backward(
            (dq, dk, dv), y, b, rotary, norms, y.dtype, want_dw=False, tile=tile
        )

    moved = 2 * shape.tokens * (3 * width - shape.k_heads * shape.head_dim)
    tiles = product((16, 32), (1, 2, 4, 8), (4, 8), (1, 3))
    return Case(moved, launch, [Tile(*tile) for tile in tiles])


def norm_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """One norm of the residual stream."""
    x, w = make.new(shape.tokens, shape.hidden), make.new(shape.hidden)
    return Case(4 * x.numel(), lambda t: rms_norm.norm_forward(x, w, 1e-5, shape.form, tile=t), _widths((1, 2, 4)))


def norm_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """Frozen weight, with the gradient of the residual that passes by."""
    x, dy, passed = (make.new(shape.tokens, shape.hidden) for _ in range(3))
    w = make.new(shape.hidden)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)

    def launch(tile: Tile | None) -> object:
        return rms_norm.norm_backward(dy, x, w, rstd, shape.form, d_sum=passed, tile=tile)

    return Case(8 * x.numel(), launch, _widths((1, 2, 4)))


def cross_entropy_rows(make: Maker, shape: Shape, rank: int) -> Case:
    """A chunk of logits, the gradient written over them: two readings and a writing."""
    rows = 1024
    logits = make.new(rows, shape.vocabulary)
    labels = torch.randint(0, shape.vocabulary, (rows,), device=make.device)
    options = cross_entropy.LossOptions(shape.softcap)
    tiles = [Tile(1, n, w) for n, w in product((2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32))]
    return Case(
        6 * logits.numel(),
        lambda t: cross_entropy.cross_entropy_rows(logits, labels, options, want_grad=True, tile=t),
        [t for t in tiles if 4 <= t.columns // t.warps // 32 <= 64],
    )


def attention(kernel: str) -> Callable[[Maker, Shape, int], Case]:
    """One kernel of attention under a causal mask."""

    def case(make: Maker, shape: Shape, rank: int) -> Case:
        of = Attention.random(shape, make.device)
        ranges, used = of.ranges(None), tile_of(of.tiles, kernel)
        launch = of.kernels(ranges)[kernel]
        tiles = [AttentionTile(*values) for values in ATTENTION_TILES.get((kernel, shape.head_dim), ())]
        used = used or (tiles or [AttentionTile(32, 32, 4, 1)])[0]
        return Case(of.flops(kernel, ranges), lambda t: launch(t or used), tiles)

    return case


class Delta(NamedTuple):
    """Operands of the delta rule's kernels, of Qwen3.5-9B's heads whatever the model."""

    inputs: DeltaInputs
    chunks: Chunks
    do: Tensor
    used: DeltaTiles

    @classmethod
    def random(cls, make: Maker, shape: Shape) -> Delta:
        """Of the model's rows and tokens."""
        keys, values, size = (16, 32, 128) if shape.head_dim >= 64 else (2, 4, 16)
        rows, length = shape.batch, shape.seq_len
        mixed = make.new(rows, length, (2 * keys + values) * size)
        q, k, v = (t.unflatten(-1, (-1, size)) for t in mixed.split([keys * size, keys * size, values * size], -1))
        gates = torch.rand(2, rows, length, values, device=make.device)
        inputs = DeltaInputs(q, k, v, -gates[0], gates[1], None, size**-0.5, normalize=True)
        tiles = delta_tiles(size, v.dtype)
        return cls(inputs, prepare(inputs, tiles), make.new(rows, length, values, size), tiles)

    def launches(self) -> dict[str, Callable[[DeltaTiles], tuple[Any, ...]]]:
        """Each kernel; the two of the gradients together, of which one tile changes."""
        scanned = scan(self.inputs, self.chunks, keep=True, tiles=self.used)
        back = scan_back(self.inputs, self.chunks, self.do, self.used)
        assert scanned.x is not None
        assert scanned.states is not None
        kept = Kept(scanned.x, scanned.states)

        def ahead(tiles: DeltaTiles, *, keep: bool) -> tuple[Any, ...]:
            made = scan(self.inputs, self.chunks, keep=keep, tiles=tiles)
            return made.out, made.x, made.states

        def both(tiles: DeltaTiles) -> tuple[Any, ...]:
            return tuple(gradients(self.inputs, self.chunks, kept, self.do, back, tiles))

        return {
            "chunks": lambda tiles: tuple(parts_of(prepare(self.inputs, tiles))),
            "scan": partial(ahead, keep=False),
            "kept": partial(ahead, keep=True),
            "back": lambda tiles: tuple(scan_back(self.inputs, self.chunks, self.do, tiles)),
            "later": both,
            "earlier": both,
        }


def parts_of(chunks: Chunks) -> tuple[Tensor, ...]:
    """All tensors of chunks."""
    return chunks.inverse, chunks.scores, chunks.rows, chunks.norms, chunks.decay


def delta(kernel: str) -> Callable[[Maker, Shape, int], Case]:
    """One kernel of the gated delta rule; work is the bytes of q, k, v and o."""

    def case(make: Maker, shape: Shape, rank: int) -> Case:
        of = Delta.random(make, shape)
        launch, size = of.launches()[kernel], of.inputs.v.shape[-1]
        values = [size] if kernel == "chunks" else [n for n in (32, 64, 128) if n <= size]
        tiles = [DeltaTile(*each) for each in product(values, (2, 4, 8), (1, 2, 3))]
        moved = of.do.element_size() * 2 * (of.do.numel() + of.inputs.q.numel())
        return Case(moved, lambda t: launch(of.used if t is None else replace(of.used, **{kernel: t})), tiles)

    return case


def int8(rows: int, tiles: tuple[ProductTile, ...]) -> Callable[[Maker, Shape, int], Case]:
    """BitNet's product of the gate's size, with many rows or with those of decoding."""

    def case(make: Maker, shape: Shape, rank: int) -> Case:
        x, masters = (torch.randn((n, shape.hidden), device=make.device) for n in (rows, shape.inner))
        (q, step), ternary = quantize_int8_triton(x), ternarise(masters)
        operands = (q, step, ternary.data, ternary.scale, None, torch.bfloat16)
        work = 2.0 * rows * shape.hidden * shape.inner
        return Case(work, lambda t: int8_product.int8_product(*operands, tile=t), list(tiles))

    return case


def log_prob(make: Maker, shape: Shape, rank: int) -> Case:
    """Log-probabilities under the frozen head; the tile is of logits that exist at a time, rows by columns."""
    x, w = make.new(shape.tokens, shape.hidden), make.new(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5)
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=make.device)
    tiles = list(product((1024, 2048, 4096), (8192, 16384, 32768)))

    def launch(tile: tuple[int, int] | None) -> object:
        return linear_log_prob(x, w, labels, **({} if tile is None else {"tile": tile}))

    return Case(2.0 * shape.tokens * shape.vocabulary * shape.hidden, launch, tiles)


def expert_weight(experts: int, hidden: int, width: int, dtype: torch.dtype) -> Callable[[Maker, Shape, int], Case]:
    """The gradient of a stack of gates and ups, of 8 experts a token."""

    def case(make: Maker, shape: Shape, rank: int) -> Case:
        cpu = make.device.type == "cpu"
        count, used, size, inner = (8, 2, 64, 32) if cpu else (experts, 8, hidden, width)
        routes = torch.rand(shape.tokens, count, device=make.device).topk(used, dim=-1).indices
        groups = grouped.group_rows(routes, count, kernels=True)
        left, x = make.new(shape.tokens * used, 2 * inner), make.new(shape.tokens, size)
        ours = partial(grouped.grouped_weight, left, x, groups, right_rows=groups.token, dtype=dtype)
        return Case(2.0 * left.numel() * size, lambda t: ours(tile=t), WEIGHT_TILES)

    return case


WEIGHT_TILES = [
    WeightTile(128, 256, 64, 8, 3), WeightTile(128, 256, 64, 8, 4), WeightTile(128, 128, 64, 8, 4),
    WeightTile(128, 128, 64, 4, 3), WeightTile(256, 128, 64, 8, 3), WeightTile(128, 128, 128, 8, 2),
    WeightTile(128, 256, 32, 8, 4), WeightTile(64, 256, 64, 4, 3),
]  # fmt: skip
MANY = (
    ProductTile(128, 256, 128, 8, 3),
    ProductTile(128, 128, 128, 4, 3),
    ProductTile(128, 256, 128, 8, 4, described=True),
    ProductTile(128, 128, 128, 4, 3, described=True),
    ProductTile(128, 128, 64, 4, 6, described=True),
    ProductTile(256, 64, 128, 4, 3, described=True),
    ProductTile(64, 128, 128, 4, 4, described=True),
)
FEW = (
    ProductTile(64, 128, 128, 4, 4),
    ProductTile(64, 64, 128, 4, 5),
    ProductTile(16, 32, 256, 4, 5),
    ProductTile(16, 64, 256, 4, 4),
    ProductTile(32, 32, 256, 4, 5),
)

KERNELS: dict[str, Callable[[Maker, Shape, int], Case]] = {
    "glu_forward_lora": glu_forward_lora,
    "glu_backward_lora": glu_backward_lora,
    "qkv_rope_forward": qkv_rope_forward,
    "qkv_rope_backward": qkv_rope_backward,
    "qkv_rope_backward_by_head": qkv_rope_backward_by_head,
    "qkv_norm_rope_forward": qkv_norm_rope_forward,
    "qkv_norm_rope_backward": qkv_norm_rope_backward,
    "qkv_norm_rope_forward_lora": qkv_norm_rope_forward_lora,
    "qkv_norm_rope_backward_lora": qkv_norm_rope_backward_lora,
    "lowrank_add": add,
    "thin_of_gate_and_up": thin_of_gate_and_up,
    "thin_of_down": thin_of_down,
    "norm_forward": norm_forward,
    "norm_backward": norm_backward,
    "cross_entropy": cross_entropy_rows,
    "glu_forward": glu_forward,
    "glu_backward": glu_backward,
    **{f"attention_{kernel}": attention(kernel) for kernel in ATTENTION_KERNELS},
    **{f"delta_{kernel}": delta(kernel) for kernel in ("chunks", "scan", "kept", "back", "later", "earlier")},
    "int8_product_many": int8(8192, MANY),
    "int8_product_8_rows": int8(8, FEW),
    "int8_product_64_rows": int8(64, FEW),
    "log_prob": log_prob,
    **{
        f"grouped_weight_{name}_{dtype}": expert_weight(*sizes, getattr(torch, dtype))
        for name, sizes in (("qwen3-30b-a3b", (128, 2048, 768)), ("olmoe", (64, 2048, 1024)))
        for dtype in ("float32", "bfloat16")
    },
}


def _results(launched: object) -> list[Tensor]:
    return [x for x in launched if isinstance(x, Tensor)] if isinstance(launched, tuple) else []


def work(kernel: str, options: argparse.Namespace) -> None:
    """In a process of its own: prints ``try I TILE`` before and ``ms I TIME`` after every tile from --start on.

    With no rounds the tiles are only compiled and launched once.
    """
    device = start(options)
    require_interpreter(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = KERNELS[kernel](Maker(device, dtype), shape_of(options), options.rank)
    clock = Clock(device, options.rounds) if options.rounds else None
    print(f"work {case.work}")
    expected = _results(case.launch(None)) if kernel.startswith(("attention", "delta")) else []
    for index, tile in enumerate([None, *case.tiles[: 1 if device.type == "cpu" else None]]):
        if index < options.start:
            continue
        print(f"try {index} {'in use' if tile is None else tile}", flush=True)
        try:
            launched = case.launch(tile)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except UNUSABLE as error:
            print(f"bad {index} {type(error).__name__}", flush=True)
            continue
        found = _results(launched) if expected else []
        norms = [float(b.float().norm()) or 1.0 for b in expected]
        wrong = [float((a.float() - b.float()).norm()) / n for a, b, n in zip(found, expected, norms, strict=True)]
        if not all(error < 1e-2 for error in wrong):  # NaN compares false
            print(f"bad {index} WRONG by {wrong}", flush=True)
            continue
        if clock is not None:
            print(f"ms {index} {clock.medians({'': lambda tile=tile: case.launch(tile)})['']}", flush=True)


def _command(kernel: str, options: argparse.Namespace, begin: int, rounds: int) -> list[str]:
    said = [sys.executable, __file__, "--model", options.model, "--rank", str(options.rank), "--work", kernel]
    return [*said, "--device", options.device, "--start", str(begin), "--rounds", str(rounds)]


def report(kernel: str, options: argparse.Namespace, table: Table) -> None:
    """Rows for the three fastest tiles and the one in use; names those that failed."""
    names: dict[int, str] = {}
    times: dict[int, float] = {}
    done, begin = 0.0, 0
    for _ in range(_RESTARTS):
        command = _command(kernel, options, begin, options.rounds)
        ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (this same script)
        names.update((int(i), tile) for i, tile in re.findall(r"^try (\d+) (.*)$", ran.stdout, re.M))
        times.update((int(i), float(ms)) for i, ms in re.findall(r"^ms (\d+) (.*)$", ran.stdout, re.M))
        done = max([done, *(float(m) for m in re.findall(r"^work (.*)$", ran.stdout, re.M))])
        for index, reason in re.findall(r"^bad (\d+) (.*)$", ran.stdout, re.M):
            table.add(kernel=kernel, tile=f"{reason}: {names[int(index)]}")
        if ran.returncode == 0:
            break
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        failed = max(names, default=-1)
        table.add(kernel=kernel, tile=f"FAILED: {names.get(failed, 'before the first tile')}: {last[0][:160]}")
        if failed < begin:
            return
        begin = failed + 1
    best = [index for index in sorted(times, key=lambda i: times[i]) if index][:3]
    for index in [*best, *([0] if 0 in times else [])]:
        table.add(kernel=kernel, ms=times[index], **{"TB/s or TFLOP/s": done / times[index] / 1e9}, tile=names[index])


def main() -> None:
    """Compiles everything at once, then times kernel after kernel."""
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES | SMALL_SHAPES))
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--only", default="", help="kernels whose name contains this")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--work", default="", choices=["", *KERNELS], help=argparse.SUPPRESS)
    arguments.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.work:
        work(options.work, options)
        return
    require_interpreter(start(options))
    kernels = [kernel for kernel in KERNELS if options.only in kernel]
    compiling = []
    if options.device == "cuda":
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        compiling = [subprocess.Popen(_command(kernel, options, 0, 0), **quiet) for kernel in kernels]  # noqa: S603
    for process in compiling:
        process.wait()
    table = Table({"kernel": "", "ms": ".4f", "TB/s or TFLOP/s": ".3f", "tile": ""})
    for kernel in kernels:
        report(kernel, options, table)
    table.save(options.json)


if __name__ == "__main__":
    main()
