"""BitNet's linear layer at four shapes: bfloat16, the int8 kernel with and without quantising, torch's _int_mm.

    python kernels/bench/bitnet.py
    python kernels/bench/bitnet.py --part tiles          # of the product: what ``ftkernels.int8_product`` is to use
    TRITON_INTERPRET=1 python kernels/bench/bitnet.py --tiny          # on a CPU, to see that it runs

For each shape and 8192 rows, in microseconds: ``F.linear`` in bfloat16; ``torch._int_mm`` without scales; the int8
product with its scales; quantising the activations in a launch of its own and behind a norm (the norm alone beside it);
forward with quantising, and how many times as fast as bfloat16 it is; forward and backward of either, with float32
masters under autocast; eager fake quantisation. The aim is 1.14 for forward with quantising at all four. ``tiles``
has a line for each tile of the product: microseconds and tera-operations a second at the four shapes; with few rows,
those of decoding, microseconds alone. Whole steps: ``bitnet_step.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.bitlinear import bit_linear, bit_linear_reference, integer_product, quantize_int8, round_weight
from ftkernels.bitlinear_kernels import norm_quantize_triton, quantize_int8_triton
from ftkernels.int8_product import ProductTile, int8_product
from ftkernels.rms_norm import rms_norm
from ftkernels.ternary import ternarise
from ftkernels.ternary_kernels import dequantize_int8_triton
from timing import Clock

#: (inputs, outputs)
SHAPES = ((2560, 6912), (4096, 4096), (4096, 14336), (14336, 4096))
TINY_SHAPES = ((64, 128),)
AIM = 1.14

#: Of many rows, and of few.
TILES = (
    ProductTile(128, 256, 128, 8, 3),
    ProductTile(128, 128, 128, 4, 3),
    ProductTile(128, 256, 128, 8, 4, described=True),
    ProductTile(128, 128, 128, 4, 3, described=True),
    ProductTile(128, 128, 64, 4, 6, described=True),
    ProductTile(256, 64, 128, 4, 3, described=True),
    ProductTile(64, 128, 128, 4, 4, described=True),
)
FEW_TILES = (
    ProductTile(64, 128, 128, 4, 4),
    ProductTile(64, 64, 128, 4, 5),
    ProductTile(16, 32, 256, 4, 5),
    ProductTile(16, 64, 256, 4, 4),
    ProductTile(32, 32, 256, 4, 5),
)


def trained(layer: Callable[[Tensor, Tensor], Tensor], x: Tensor, masters: Tensor, dy: Tensor) -> Callable[[], object]:
    """Forward and backward of a layer under autocast, gradients of x and masters."""

    def run() -> object:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = layer(x, masters)
        return torch.autograd.grad(y, (x, masters), dy)

    return run


def line(clock: Clock, rows: int, inner: int, outer: int) -> None:
    """Measures one shape and prints a line."""
    device = clock.device
    x = torch.randn((rows, inner), device=device, dtype=torch.bfloat16)
    masters = torch.randn((outer, inner), device=device) / inner**0.5
    weight, norm = masters.to(torch.bfloat16), torch.ones(inner, device=device, dtype=torch.bfloat16)
    ternary = ternarise(masters)
    q, step = quantize_int8_triton(x)
    dy = torch.randn((rows, outer), device=device, dtype=torch.bfloat16)
    leaf, trainable = x.clone().requires_grad_(), masters.clone().requires_grad_()

    def product() -> Tensor:
        return int8_product(q, step, ternary.data, ternary.scale, None, torch.bfloat16)

    def forward() -> Tensor:
        rounded, steps = quantize_int8_triton(x)
        return int8_product(rounded, steps, ternary.data, ternary.scale, None, torch.bfloat16)

    def ours(activations: Tensor, matrix: Tensor) -> Tensor:
        return bit_linear(quantize_int8(activations), matrix, ternary)

    def fake(activations: Tensor, matrix: Tensor) -> Tensor:
        return bit_linear_reference(activations, matrix, None, ternary)

    us = clock.medians(
        {
            "bf16": lambda: F.linear(x, weight),
            "_int_mm": lambda: torch._int_mm(q, ternary.data.t()),
            "int8": product,
            "quantise": lambda: quantize_int8_triton(x),
            "norm": lambda: rms_norm(x, norm, 1e-5),
            "norm+quantise": lambda: norm_quantize_triton(x, norm, 1e-5),
            "forward": forward,
            "bf16 f+b": trained(F.linear, leaf, trainable, dy),
            "int8 f+b": trained(ours, leaf, trainable, dy),
            "eager fake f+b": trained(fake, leaf, trainable, dy),
            "round weights": lambda: round_weight(masters),
            "torch round weights": lambda: ternarise(masters),
            "int8 to bf16": lambda: dequantize_int8_triton(q, step, torch.bfloat16),
        }
    )
    exact = integer_product(q[:256], ternary.data) * step[:256, None] * ternary.scale
    equal = torch.equal(product()[:256], exact.to(torch.bfloat16))
    faster = us["bf16"] / us["forward"]
    shown = "  ".join(f"{name} {1e3 * value:.0f}" for name, value in us.items())
    tops = 2.0 * rows * inner * outer / us["int8"] / 1e9
    print(
        f"{inner}->{outer}: {shown}  int8 {tops:.0f} TOPS; forward {faster:.2f} x bf16"
        f"{'' if faster >= AIM else f' (below the aim of {AIM})'}; equal to plain torch: {equal}",
        flush=True,
    )


def tiles(clock: Clock, rows: int, shapes: tuple[tuple[int, int], ...], wanted: tuple[ProductTile, ...]) -> None:
    """Prints a line for each tile, all shapes in it, and the one that is in use first."""
    operands = []
    for inner, outer in shapes:
        x, masters = (torch.randn((n, inner), device=clock.device) for n in (rows, outer))
        q, step = quantize_int8_triton(x)
        ternary = ternarise(masters)
        operands.append((q, step, ternary.data, ternary.scale, None, torch.bfloat16))
    print(f"tiles, {rows} rows: {', '.join(f'{inner}->{outer}' for inner, outer in shapes)}", flush=True)
    for tile in (None, *wanted):
        launches = [partial(int8_product, *each, tile=tile) for each in operands]
        try:
            us = [1e3 * clock.medians({"": launch})[""] for launch in launches]
        except (triton.CompilationError, triton.runtime.errors.OutOfResources, RuntimeError) as error:
            print(f"  {type(error).__name__}: {tile}", flush=True)
            continue
        tops = [2e-6 * rows * i * o / each for (i, o), each in zip(shapes, us, strict=True)]
        told = "  ".join(f"{each:6.0f} us {rate:5.0f}" for each, rate in zip(us, tops, strict=True))
        print(f"  {told}  {'in use' if tile is None else tile}", flush=True)


def main() -> None:
    """A line for each shape, and the tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--part", nargs="+", default=["layers", "tiles"], choices=["layers", "tiles", "few"])
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    clock = Clock(torch.device("cpu" if options.tiny else "cuda"), rounds=1 if options.tiny else options.rounds)
    shapes, rows = (TINY_SHAPES, 32) if options.tiny else (SHAPES, options.rows)
    if "layers" in options.part:
        for inner, outer in shapes:
            line(clock, rows, inner, outer)
    if "tiles" in options.part:
        tiles(clock, rows, shapes, TILES[:1] if options.tiny else TILES)
    if "few" in options.part:
        for few in (8, 64):
            tiles(clock, few, shapes, FEW_TILES)


if __name__ == "__main__":
    main()
