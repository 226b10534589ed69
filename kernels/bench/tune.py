"""Time the tiles that ``ftkernels/tiles.py`` chooses between, and print the best of each kernel.

    python kernels/bench/tune.py --model llama3.1-8b

The table in ``tiles.py`` is then edited by hand: nothing is searched for while training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Maker
from ftkernels import glu_kernels, lowrank_add, qkv_rope
from ftkernels.tiles import Tile, tile_for
from shapes import SHAPES, Shape
from timing import Clock

Launch = Callable[[Tile], object]


def launches(make: Maker, shape: Shape, rank: int) -> Iterator[tuple[str, float, Launch, list[Tile]]]:
    """(kernel, bytes it moves, launch, tiles to try)."""
    rows, inner, hidden = shape.tokens, shape.inner, shape.hidden
    both = make.new(rows, 2 * inner)
    gate, up = both[:, :inner], both[:, inner:]
    low = glu_kernels.GluLowRank(make.new(rows, 2 * rank), make.new(2 * inner, rank), make.new(rank, inner))
    dya, dh = make.new(rows, rank), make.new(rows, inner)
    size = 2 * rows * inner
    act = shape.activation
    flat = [Tile(m, n, w) for m, n, w in product((1, 4, 16), (256, 512, 1024), (4, 8)) if 1024 <= m * n <= 8192]
    dots = [
        Tile(m, n, w, s, p)
        for m, n, w, s, p in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3), (1024, 2048))
        if 2048 <= m * n <= 8192
    ]
    yield "glu_forward", 3 * size, lambda t: glu_kernels.glu_forward(gate, up, act, tile=t), flat
    yield "glu_backward", 6 * size, lambda t: glu_kernels.glu_backward(dh, gate, up, act, want_h=True, tile=t), flat
    yield "glu_forward_lora", 3 * size, lambda t: glu_kernels.glu_forward(gate, up, act, low, tile=t), dots
    yield (
        "glu_backward_lora",
        6 * size,
        lambda t: glu_kernels.glu_backward(dh, gate, up, act, lowrank=low, dya=dya, want_h=True, tile=t),
        dots,
    )
    y, xa, b, res = make.new(rows, hidden), make.new(rows, rank), make.new(hidden, rank), make.new(rows, hidden)
    adds = [Tile(m, n, w) for m, n, w in product((32, 64, 128), (64, 128, 256), (4, 8)) if m * n <= 16384]
    yield (
        "lowrank_add",
        6 * rows * hidden,
        lambda t: lowrank_add.lowrank_add(y, xa, b, res, triton_kernel=True, tile=t),
        adds,
    )
    d, heads = shape.head_dim, shape.q_heads + 2 * shape.k_heads
    cos = make.new(1, shape.seq_len, d)
    rotary = qkv_rope.Rotary(cos, cos, shape.q_heads, shape.k_heads)
    qkv, xa3, b3 = make.new(rows, heads * d), make.new(rows, 3 * rank), make.new(heads * d, rank)
    turns = [Tile(m, n, w) for m, n, w in product((16, 32, 64), (1, 2, 4, 8), (4, 8))]
    moved = 4 * rows * heads * d
    yield "qkv_rope_forward", moved, lambda t: qkv_rope.qkv_rope_forward(qkv, xa3, b3, rotary, tile=t), turns
    dq = make.new(shape.batch, shape.q_heads, shape.seq_len, d)
    dk, dv = (make.new(shape.batch, shape.k_heads, shape.seq_len, d) for _ in range(2))
    yield (
        "qkv_rope_backward",
        moved,
        lambda t: qkv_rope.qkv_rope_backward(dq, dk, dv, b3, rotary, qkv.dtype, tile=t),
        turns,
    )


def main() -> None:
    """Print the five fastest tiles of each kernel and the tile in use."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda")
    clock = Clock(device, options.rounds)
    make = Maker(device, torch.bfloat16)
    for name, moved, launch, tiles in launches(make, SHAPES[options.model], options.rank):
        if options.only not in name:
            continue
        used = tile_for(name)
        usable: dict[str, Callable[[], object]] = {}
        for tile in dict.fromkeys([used, *tiles]):
            try:
                launch(tile)
            except (triton.CompilationError, triton.runtime.errors.OutOfResources) as error:
                print(f"{name} {tile}: {type(error).__name__}")
                continue
            usable[str(tile)] = lambda tile=tile, launch=launch: launch(tile)
        times = clock.medians(usable)
        for tile_name, milliseconds in sorted(times.items(), key=lambda item: item[1])[:5]:
            print(f"{name:20s} {milliseconds:8.4f} ms {moved / milliseconds / 1e9:7.3f} TB/s  {tile_name}")
        print(f"{name:20s} {times[str(used)]:8.4f} ms {moved / times[str(used)] / 1e9:7.3f} TB/s  in use", flush=True)


if __name__ == "__main__":
    main()
