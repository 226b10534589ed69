"""fp8 products and the kernel that quantises their operands, by the shapes of a model's linear layers.

    python kernels/bench/fp8.py --model llama3.1-8b

For each product and direction: TFLOP/s in bfloat16, in e4m3 with row scales (as ``ftkernels.fp8`` takes it, and without
fast accumulation), the relative error against the quantised operands and against the unquantised product, and the
time of quantising the operand that is not a weight, with the bandwidth over the bytes that have to move.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.fp8 import multiply_rows, quantize_fp8
from shapes import SHAPES
from timing import Clock


def relative(value: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of ``exact``."""
    return float((value.float() - exact.float()).norm() / exact.float().norm())


def line(clock: Clock, name: str, rows: int, inner: int, out: int) -> None:
    """Measures (rows, inner) @ (inner, out) and prints a line."""
    x = torch.randn((rows, inner), device=clock.device, dtype=torch.bfloat16)
    w = torch.randn((out, inner), device=clock.device, dtype=torch.bfloat16) / inner**0.5
    qx, qw = quantize_fp8(x), quantize_fp8(w)

    def exact_sums() -> Tensor:
        scales = {"scale_a": qx.scale[:, None], "scale_b": qw.scale[None]}
        return torch._scaled_mm(qx.data, qw.data.t(), out_dtype=torch.bfloat16, **scales)

    def fast_sums() -> Tensor:
        return multiply_rows(qx, qw, torch.bfloat16)

    ms = clock.medians(
        {"bf16": lambda: x @ w.t(), "fast": fast_sums, "exact": exact_sums, "quantise": lambda: quantize_fp8(x)}
    )
    tera = {key: 2.0 * rows * inner * out / value / 1e9 for key, value in ms.items()}
    reference = qx.dequantize(torch.bfloat16) @ qw.dequantize(torch.bfloat16).t()
    print(
        f"{name:22s} bf16 {tera['bf16']:5.0f}  fp8 {tera['fast']:5.0f}  exact sums {tera['exact']:5.0f} TFLOP/s   "
        f"off {relative(fast_sums(), reference):.1e}, exact sums {relative(exact_sums(), reference):.1e}, "
        f"unquantised {relative(fast_sums(), x @ w.t()):.1e}   "
        f"quantising {ms['quantise']:.3f} ms, {3 * rows * inner / ms['quantise'] / 1e9:.2f} TB/s",
        flush=True,
    )


def main() -> None:
    """A line for each linear of the model and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    options = parser.parse_args()
    shape = SHAPES[options.model]
    heads = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim
    sizes = {
        "qkv": (heads, shape.hidden),
        "o": (shape.hidden, shape.q_heads * shape.head_dim),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }
    torch.manual_seed(0)
    clock = Clock(torch.device("cuda"), rounds=20)
    for name, (out, inner) in sizes.items():
        line(clock, f"{name}, forward", shape.tokens, inner, out)
        line(clock, f"{name}, backward", shape.tokens, out, inner)


if __name__ == "__main__":
    main()
