"""BitNet's linear layer at four shapes: bfloat16, the int8 kernel with and without quantising, torch's _int_mm.

    python kernels/bench/bitnet.py

For each shape and 8192 rows, in microseconds: ``F.linear`` in bfloat16; ``torch._int_mm`` without scales; the int8
product with its scales; quantising the activations in a launch of its own and behind a norm (the norm alone beside it);
forward with quantising, and how many times as fast as bfloat16 it is; forward and backward of either, with float32
masters under autocast; eager fake quantisation. The aim is 1.14 for forward with quantising at all four.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.bitlinear import bit_linear, bit_linear_reference, integer_product, quantize
from ftkernels.bitlinear_kernels import int8_product, norm_quantize_triton, quantize_rows_triton
from ftkernels.rms_norm import rms_norm
from ftkernels.ternary import ternarise
from timing import Clock

#: (inputs, outputs)
SHAPES = ((2560, 6912), (4096, 4096), (4096, 14336), (14336, 4096))
AIM = 1.14


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
    q, step = quantize_rows_triton(x)
    dy = torch.randn((rows, outer), device=device, dtype=torch.bfloat16)
    leaf, trainable = x.clone().requires_grad_(), masters.clone().requires_grad_()

    def product() -> Tensor:
        return int8_product(q, step, ternary.data, ternary.scale, None, torch.bfloat16)

    def forward() -> Tensor:
        rounded, steps = quantize_rows_triton(x)
        return int8_product(rounded, steps, ternary.data, ternary.scale, None, torch.bfloat16)

    def ours(activations: Tensor, matrix: Tensor) -> Tensor:
        return bit_linear(quantize(activations), matrix, ternary)

    def fake(activations: Tensor, matrix: Tensor) -> Tensor:
        return bit_linear_reference(activations, matrix, None, ternary)

    us = clock.medians(
        {
            "bf16": lambda: F.linear(x, weight),
            "_int_mm": lambda: torch._int_mm(q, ternary.data.t()),
            "int8": product,
            "quantise": lambda: quantize_rows_triton(x),
            "norm": lambda: rms_norm(x, norm, 1e-5),
            "norm+quantise": lambda: norm_quantize_triton(x, norm, 1e-5),
            "forward": forward,
            "bf16 f+b": trained(F.linear, leaf, trainable, dy),
            "int8 f+b": trained(ours, leaf, trainable, dy),
            "eager fake f+b": trained(fake, leaf, trainable, dy),
            "ternarise": lambda: ternarise(masters),
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


def main() -> None:
    """A line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    options = parser.parse_args()
    torch.manual_seed(0)
    clock = Clock(torch.device("cuda"), rounds=20)
    for inner, outer in SHAPES:
        line(clock, options.rows, inner, outer)


if __name__ == "__main__":
    main()
