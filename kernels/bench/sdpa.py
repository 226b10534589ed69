"""Times torch's attention backends at the shapes of the shipped recipes: which one serves dense causal attention best.

Prints one line a case: backend, whether keys and values are repeated for GQA, forward and backward milliseconds.
Usage: python kernels/bench/sdpa.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

# name: batch, seq_len, query heads, key heads, head size
SHAPES = {"llama3.1-8b": (2, 4096, 32, 8, 128), "gemma2-9b": (2, 4096, 16, 8, 256), "qwen3-8b": (2, 4096, 32, 8, 128)}
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def attention(q: Tensor, k: Tensor, v: Tensor, *, repeat: bool) -> Tensor:
    """Causal attention of q (B, Hq, S, D) and k, v (B, Hkv, S, D); ``repeat`` copies k and v to Hq heads first."""
    if repeat:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not repeat)


def measure(shape: tuple[int, ...], backend: SDPBackend, *, repeat: bool) -> dict[str, float | str]:
    """Median forward and backward milliseconds of one case, or why it does not run."""
    batch, seq, heads, kv_heads, size = shape
    options = {"device": "cuda", "dtype": torch.bfloat16}
    # Laid out as projections leave them: (B, S, H, D), seen as (B, H, S, D).
    q, k, v = (
        torch.randn((batch, seq, h, size), **options).transpose(1, 2).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    )
    grad = torch.randn((batch, seq, heads, size), **options).transpose(1, 2)
    try:
        with sdpa_kernel([backend]):
            forward = do_bench(lambda: attention(q, k, v, repeat=repeat), return_mode="median")
            out = attention(q, k, v, repeat=repeat)
            backward = do_bench(
                lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), return_mode="median"
            )
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0]}
    return {"forward_ms": forward, "backward_ms": backward}


def main() -> None:
    """Runs every case and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for model, shape in SHAPES.items():
        for name, backend in BACKENDS.items():
            for repeat in (False, True):
                case = f"{model} {name} {'repeated' if repeat else 'gqa'}"
                results[case] = measure(shape, backend, repeat=repeat)
                print(case, results[case], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
