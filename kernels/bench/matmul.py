"""The matmul rate of this machine, at once and under load, by the shapes of a model's linear layers.

    python kernels/bench/matmul.py --model llama3.1-8b

A GPU that has rested runs the first products faster than it can keep up: its power limit then lowers the clock. The
first column is the rate of the first five products after a second of rest, the second that after ``--seconds`` of
nothing else, with the clock and the power that nvidia-smi reads meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shapes import SHAPES


def reading() -> str:
    """Clock and power, as nvidia-smi prints them; empty where there is no such command."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""


def rate(product: Callable[[], Tensor], flops: float, repeats: int) -> float:
    """TFLOP/s of ``repeats`` products in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        product()
    end.record()
    torch.cuda.synchronize()
    return repeats * flops / start.elapsed_time(end) / 1e9


def measure(name: str, product: Callable[[], Tensor], flops: float, seconds: float) -> None:
    """Prints a line."""
    product()
    torch.cuda.synchronize()
    time.sleep(1.0)
    burst = rate(product, flops, 5)
    rates, state, began = [], "", time.monotonic()
    while time.monotonic() - began < seconds:
        rates.append(rate(product, flops, 20))
        if not state and time.monotonic() - began > 0.7 * seconds:
            state = reading()
    late = sorted(rates[len(rates) // 2 :])
    print(f"{name:24s} {burst:7.1f} TFLOP/s at first {late[len(late) // 2]:7.1f} under load   {state}", flush=True)


def main() -> None:
    """A line for 8192 cubed, then one for each linear of the model and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    shape = SHAPES[options.model]
    heads, rows = (shape.q_heads + 2 * shape.k_heads) * shape.head_dim, shape.tokens
    sizes = {
        "qkv": (heads, shape.hidden),
        "o": (shape.hidden, shape.q_heads * shape.head_dim),
        "gate and up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }

    def new(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale

    torch.manual_seed(0)
    a, b = new(8192, 8192), new(8192, 8192)
    measure("8192 cubed", lambda: a @ b, 2.0 * 8192**3, options.seconds)
    for name, (out, inner) in sizes.items():
        x, dy, w = new(rows, inner), new(rows, out), new(out, inner, scale=0.02)
        flops = 2.0 * rows * out * inner
        measure(f"{name}, forward", lambda x=x, w=w: x @ w.t(), flops, options.seconds)
        measure(f"{name}, backward", lambda dy=dy, w=w: dy @ w, flops, options.seconds)


if __name__ == "__main__":
    main()
