"""Time the tiles that ``ftkernels/tiles.py`` chooses between, and print the best of each kernel and the one in use.

    python kernels/bench/tune.py --model llama3.1-8b

The table in ``tiles.py`` is then edited by hand: nothing is searched for while training. Every kernel has a process of
its own, and a new one from the next tile on when a tile brings it down: an illegal access spoils a CUDA context for
good. Tiles that fail are named. All kernels compile at once first, then they are timed one after the other.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Maker
from ftkernels import cross_entropy, glu_kernels, lowrank_add, norm_parts, qkv_norm_rope, qkv_parts, qkv_rope
from ftkernels.tiles import Tile
from shapes import SHAPES, Shape
from timing import Clock

Launch = Callable[[Tile | None], object]
# (bytes moved, launch, tiles to try)
Case = tuple[float, Launch, list[Tile]]


def _flat() -> list[Tile]:
    return [Tile(m, n, w) for m, n, w in product((1, 4, 16), (256, 512, 1024), (4, 8)) if 1024 <= m * n <= 8192]


def _dots() -> list[Tile]:
    tiles = product(
        ((32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 8), (128, 32, 4)),
        (2, 3),
        (256, 512, 1024),
    )
    return [Tile(m, n, w, s, p) for (m, n, w), s, p in tiles]


def _widths(rows: tuple[int, ...]) -> list[Tile]:
    """Columns are those of the whole row; only rows a program and warps are chosen."""
    return [Tile(m, 0, w) for m, w in product(rows, (4, 8, 16))]


def glu_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """The plain unit."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    return 6 * gate.numel(), lambda t: glu_kernels.glu_forward(gate, up, shape.activation, tile=t), _flat()


def glu_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """The plain unit's backward, h included."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    dh = make.new(shape.tokens, shape.inner)
    return (
        12 * dh.numel(),
        lambda t: glu_kernels.glu_backward(dh, gate, up, shape.activation, want_h=True, tile=t),
        _flat(),
    )


def _low(make: Maker, shape: Shape, rank: int) -> glu_kernels.GluLowRank:
    rows, inner = shape.tokens, shape.inner
    return glu_kernels.GluLowRank(make.new(rows, 2 * rank), make.new(2 * inner, rank), make.new(rank, inner))


def glu_forward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """With the adapters' terms and their sums."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    low = _low(make, shape, rank)
    return 6 * gate.numel(), lambda t: glu_kernels.glu_forward(gate, up, shape.activation, low, tile=t), _dots()


def glu_backward_lora(make: Maker, shape: Shape, rank: int) -> Case:
    """With the adapters' terms and their sums, h included."""
    gate, up = make.new(shape.tokens, 2 * shape.inner).chunk(2, 1)
    low, dya, dh = _low(make, shape, rank), make.new(shape.tokens, rank), make.new(shape.tokens, shape.inner)

    def launch(tile: Tile | None) -> object:
        return glu_kernels.glu_backward(dh, gate, up, shape.activation, lowrank=low, dya=dya, want_h=True, tile=tile)

    return 12 * dh.numel(), launch, _dots()


def add(make: Maker, shape: Shape, rank: int) -> Case:
    """``y + xa @ b.T + residual``."""
    y, xa = make.new(shape.tokens, shape.hidden), make.new(shape.tokens, rank)
    b, residual = make.new(shape.hidden, rank), make.new(shape.tokens, shape.hidden)
    tiles = [Tile(m, n, w) for m, n, w in product((16, 32, 64), (64, 128, 256), (4, 8)) if m * n <= 8192]
    return 6 * y.numel(), lambda t: lowrank_add.lowrank_add(y, xa, b, residual, triton_kernel=True, tile=t), tiles


def _rotary(make: Maker, shape: Shape) -> qkv_parts.Rotary:
    cos = make.new(1, shape.seq_len, shape.head_dim)
    return qkv_parts.Rotary(cos, cos, shape.q_heads, shape.k_heads)


def _turns() -> list[Tile]:
    """Columns are heads of one program. Whole tiles of 64 rows spill, and so do programs of a single head."""
    return [Tile(m, n, w) for m, n, w in product((16, 32), (2, 4, 8), (4, 8))]


def qkv_rope_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """In place on the projection's output."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    y, xa, b = make.new(shape.tokens, width, scale=0.1), make.new(shape.tokens, 3 * rank), make.new(width, rank)
    rotary = _rotary(make, shape)
    return 4 * y.numel(), lambda t: qkv_rope.qkv_rope_forward(y, xa, b, rotary, tile=t), _turns()


def qkv_rope_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """Gradients as attention leaves them: (B, S, heads, D) seen as (B, heads, S, D)."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    dq, dk, dv = (make.new(shape.batch, shape.seq_len, n, shape.head_dim).transpose(1, 2) for n in sizes)
    b, rotary = make.new(width, rank), _rotary(make, shape)
    return (
        4 * shape.tokens * width,
        lambda t: qkv_rope.qkv_rope_backward(dq, dk, dv, b, rotary, dq.dtype, tile=t),
        _turns(),
    )


def qkv_rope_backward_by_head(make: Maker, shape: Shape, rank: int) -> Case:
    """Gradients that lie a head after another, as own attention kernels leave them."""
    width = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    sizes = (shape.q_heads, shape.k_heads, shape.k_heads)
    dq, dk, dv = (make.new(shape.batch, n, shape.seq_len, shape.head_dim) for n in sizes)
    b, rotary = make.new(width, rank), _rotary(make, shape)
    return (
        4 * shape.tokens * width,
        lambda t: qkv_rope.qkv_rope_backward(dq, dk, dv, b, rotary, dq.dtype, tile=t),
        _turns(),
    )


def _norms(make: Maker, shape: Shape) -> qkv_parts.HeadNorms:
    weight = make.new(shape.head_dim)
    return qkv_parts.HeadNorms(weight, weight, 1e-6, shape.form)


def qkv_norm_rope_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """Without adapters: reads q and k, writes them elsewhere."""
    heads = shape.q_heads + shape.k_heads
    y = make.new(shape.tokens, (heads + shape.k_heads) * shape.head_dim)
    rotary, norms = _rotary(make, shape), _norms(make, shape)
    return (
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
    return moved, launch, [Tile(m, n, w) for m, n, w in product((8, 16, 32), (1, 2, 4, 8), (4, 8))]


def norm_forward(make: Maker, shape: Shape, rank: int) -> Case:
    """One norm of the residual stream."""
    x, w = make.new(shape.tokens, shape.hidden), make.new(shape.hidden)
    return 4 * x.numel(), lambda t: norm_parts.norm_forward(x, w, 1e-5, shape.form, tile=t), _widths((1, 2, 4))


def norm_backward(make: Maker, shape: Shape, rank: int) -> Case:
    """Frozen weight, with the gradient of the residual that passes by."""
    x, dy, passed = (make.new(shape.tokens, shape.hidden) for _ in range(3))
    w = make.new(shape.hidden)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-5)

    def launch(tile: Tile | None) -> object:
        return norm_parts.norm_backward(dy, x, w, rstd, shape.form, d_sum=passed, tile=tile)

    return 8 * x.numel(), launch, _widths((1, 2, 4))


def cross_entropy_rows(make: Maker, shape: Shape, rank: int) -> Case:
    """A chunk of logits, the gradient written over them: two readings and a writing."""
    rows = 1024
    logits = make.new(rows, shape.vocabulary)
    labels = torch.randint(0, shape.vocabulary, (rows,), device=make.device)
    options = cross_entropy.LossOptions(shape.softcap)
    tiles = [Tile(1, n, w) for n, w in product((2048, 4096, 8192, 16384, 32768), (4, 8, 16, 32))]
    return (
        6 * logits.numel(),
        lambda t: cross_entropy.cross_entropy_rows(logits, labels, options, want_grad=True, tile=t),
        [t for t in tiles if 4 <= t.columns // t.warps // 32 <= 64],
    )


KERNELS: dict[str, Callable[[Maker, Shape, int], Case]] = {
    "glu_forward_lora": glu_forward_lora,
    "glu_backward_lora": glu_backward_lora,
    "qkv_rope_forward": qkv_rope_forward,
    "qkv_rope_backward": qkv_rope_backward,
    "qkv_rope_backward_by_head": qkv_rope_backward_by_head,
    "qkv_norm_rope_forward": qkv_norm_rope_forward,
    "qkv_norm_rope_backward": qkv_norm_rope_backward,
    "lowrank_add": add,
    "norm_forward": norm_forward,
    "norm_backward": norm_backward,
    "cross_entropy": cross_entropy_rows,
    "glu_forward": glu_forward,
    "glu_backward": glu_backward,
}


def work(kernel: str, shape: Shape, rank: int, start: int, rounds: int) -> None:
    """In a process of its own: print ``try I TILE`` before and ``ms I TIME`` after every tile from ``start`` on.

    With no rounds the tiles are only compiled and launched once.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    moved, launch, tiles = KERNELS[kernel](Maker(device, torch.bfloat16), shape, rank)
    clock = Clock(device, rounds) if rounds else None
    print(f"moved {moved}")
    for index, tile in enumerate([None, *tiles]):
        if index < start:
            continue
        print(f"try {index} {'in use' if tile is None else tile}", flush=True)
        try:
            launch(tile)
            torch.cuda.synchronize()
        except (triton.CompilationError, triton.runtime.errors.OutOfResources) as error:
            print(f"bad {index} {type(error).__name__}", flush=True)
            continue
        if clock is not None:
            print(f"ms {index} {clock.medians({'': lambda tile=tile: launch(tile)})['']}", flush=True)


def _command(kernel: str, options: argparse.Namespace, start: int, rounds: int) -> list[str]:
    said = [sys.executable, __file__, "--model", options.model, "--rank", str(options.rank), "--work", kernel]
    return [*said, "--start", str(start), "--rounds", str(rounds)]


_RESTARTS = 4


def report(kernel: str, options: argparse.Namespace) -> None:
    """Time one kernel's tiles; print the three fastest, the one in use, and those that failed."""
    names: dict[int, str] = {}
    times: dict[int, float] = {}
    moved, start = 0.0, 0
    for _ in range(_RESTARTS):
        command = _command(kernel, options, start, options.rounds)
        ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (this same script)
        names.update((int(i), tile) for i, tile in re.findall(r"^try (\d+) (.*)$", ran.stdout, re.M))
        times.update((int(i), float(ms)) for i, ms in re.findall(r"^ms (\d+) (.*)$", ran.stdout, re.M))
        moved = max([moved, *(float(m) for m in re.findall(r"^moved (.*)$", ran.stdout, re.M))])
        for index, reason in re.findall(r"^bad (\d+) (.*)$", ran.stdout, re.M):
            print(f"{kernel:26s} {reason}: {names[int(index)]}")
        if ran.returncode == 0:
            break
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        failed = max(names, default=-1)
        print(f"{kernel:26s} FAILED: {names.get(failed, 'before the first tile')}: {last[0][:160]}")
        if failed < start:
            return
        start = failed + 1
    best = [index for index in sorted(times, key=lambda i: times[i]) if index][:3]
    for index in [*best, *([0] if 0 in times else [])]:
        rate = moved / times[index] / 1e9
        print(f"{kernel:26s} {times[index]:8.4f} ms {rate:7.3f} TB/s  {names[index]}", flush=True)


def main() -> None:
    """Compile everything at once, then time kernel after kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", default="", choices=["", *KERNELS], help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, SHAPES[options.model], options.rank, options.start, options.rounds)
        return
    kernels = [kernel for kernel in KERNELS if options.only in kernel]
    compiling = [
        subprocess.Popen(  # noqa: S603  (this same script)
            _command(kernel, options, 0, 0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for kernel in kernels
    ]
    for process in compiling:
        process.wait()
    for kernel in kernels:
        report(kernel, options)


if __name__ == "__main__":
    main()
