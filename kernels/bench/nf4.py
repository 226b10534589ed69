"""Dequantising NF4, by the shapes of a model's linear layers: alone, between large products, and by bitsandbytes.

    python kernels/bench/nf4.py --model llama3.1-8b

Alone the GPU runs at its highest clock; between products it runs at the clock that its power limit leaves, and the
caches hold something else: that is what a training step sees. TB/s are over the bytes that have to move, half a byte
in, with scales, and two out for each element. bitsandbytes is timed where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.nf4 import quantize_nf4
from shapes import SHAPES
from timing import Clock

_WARM_UP, _TIMED = 40, 80


def between_products(call: Callable[[], object], product: Callable[[], object]) -> float:
    """Median milliseconds of ``call`` when each follows a ``product``."""
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_WARM_UP + _TIMED)
    ]
    for start, end in events:
        product()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in events[_WARM_UP:])
    return times[len(times) // 2]


def line(clock: Clock, name: str, out_features: int, in_features: int, rows: int) -> None:
    """Measures one matrix and prints a line."""
    dense = torch.randn((out_features, in_features), device=clock.device, dtype=torch.bfloat16) * 0.02
    x = torch.randn((rows, in_features), device=clock.device, dtype=torch.bfloat16)
    weight, out = quantize_nf4(dense), torch.empty_like(dense)
    calls: dict[str, Callable[[], object]] = {"ours": lambda: weight.dequantize_into(out)}
    if importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes import functional

        data, state = functional.quantize_4bit(dense, quant_type="nf4", compress_statistics=True)
        calls["bitsandbytes"] = lambda: functional.dequantize_4bit(data, state)
    moved = weight.stored_bytes + 2 * dense.numel()
    alone = clock.medians(calls)
    for kind, call in calls.items():
        loaded = between_products(call, lambda: x @ dense.t())
        print(
            f"{name:12s} {kind:14s} alone {alone[kind]:.4f} ms {moved / alone[kind] / 1e9:.2f} TB/s   "
            f"between products {loaded:.4f} ms {moved / loaded / 1e9:.2f} TB/s",
            flush=True,
        )


def main() -> None:
    """A line for each linear of the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    options = parser.parse_args()
    shape = SHAPES[options.model]
    torch.manual_seed(0)
    clock = Clock(torch.device("cuda"), rounds=20)
    sizes = {
        "q": (shape.q_heads * shape.head_dim, shape.hidden),
        "k, v": (shape.k_heads * shape.head_dim, shape.hidden),
        "gate, up": (shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }
    for name, (out_features, in_features) in sizes.items():
        line(clock, name, out_features, in_features, shape.tokens)


if __name__ == "__main__":
    main()
