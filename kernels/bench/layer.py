"""Time decoder layers built from the fused operations, forward and backward: ms and kept bytes a layer, kernels by
time.

    python kernels/bench/layer.py --model llama3.1-8b --layers 8 --profile
    python kernels/bench/layer.py --device cpu --tiny

Random weights, LoRA on all seven linears with float32 adapters, attention by torch's SDPA (for models with a softcap
inside attention that is the time without it). The tokens/s printed are those of these layers and the head alone: no
embedding, no optimizer.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cases import Maker
from ftkernels.linear_cross_entropy import linear_cross_entropy
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm, Projection, join_weights
from ftkernels.rms_norm import rms_norm_add
from shapes import SHAPES, Shape


class Layer:
    """One decoder layer: pre-norms, and Gemma-2's post-norms for its form."""

    def __init__(self, make: Maker, shape: Shape, rank: int) -> None:
        self.shape = shape
        h, f, d = shape.hidden, shape.inner, shape.head_dim
        q, k = shape.q_heads * d, shape.k_heads * d
        sizes = {"q": (q, h), "k": (k, h), "v": (k, h), "o": (h, q), "gate": (f, h), "up": (f, h), "down": (h, f)}
        weights = {name: make.new(*size, scale=size[1] ** -0.5) for name, size in sizes.items()}
        join_weights([weights[n] for n in "qkv"])
        join_weights([weights["gate"], weights["up"]])
        adapters = {name: make.adapter(*size, rank) for name, size in sizes.items()}
        self.parameters = [t for pair in adapters.values() for t in pair]
        self.linear = {n: Projection(weights[n], None, *adapters[n], 2.0) for n in sizes}
        self.norms = [Norm(make.new(h), 1e-6, shape.form) for _ in range(4)]

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        p, gemma = self.linear, self.shape.form == "gemma"
        before, after, mlp_before, mlp_after = self.norms
        q, k, v, x = lora_qkv(x, p["q"], p["k"], p["v"], head_dim=self.shape.head_dim, norm=before, rope=rope)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).flatten(2)
        activation = self.shape.activation
        if not gemma:
            x = lora_linear(o, p["o"], residual=x)
            out = lora_mlp(x, p["gate"], p["up"], p["down"], activation=activation, norm=mlp_before, residual="add")
            assert isinstance(out, Tensor)
            return out
        x = rms_norm_add(lora_linear(o, p["o"]), x, after.weight, after.eps, form="gemma")
        y, x = lora_mlp(x, p["gate"], p["up"], p["down"], activation=activation, norm=mlp_before, residual="return")
        return rms_norm_add(y, x, mlp_after.weight, mlp_after.eps, form="gemma")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print milliseconds and bytes a layer, the rate of the whole, and the profile where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    shape = SHAPES[options.model].tiny() if options.tiny else SHAPES[options.model]
    make = Maker(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    layers = [Layer(make, shape, options.rank) for _ in range(options.layers)]
    head = make.new(shape.vocabulary, shape.hidden, scale=shape.hidden**-0.5)
    rope = (make.new(1, shape.seq_len, shape.head_dim), make.new(1, shape.seq_len, shape.head_dim))
    labels = torch.randint(0, shape.vocabulary, (shape.tokens,), device=device)
    embedded = make.new(shape.batch, shape.seq_len, shape.hidden)
    adapters = [t for layer in layers for t in layer.parameters]

    def step() -> tuple[float, float, float, int]:
        start_bytes = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        begin = _now(device)
        x = embedded
        for layer in layers:
            x = layer(x, rope)
        middle = _now(device)
        kept = (torch.cuda.memory_allocated() if device.type == "cuda" else 0) - start_bytes
        loss = linear_cross_entropy(x.flatten(0, 1), head, labels, softcap=shape.softcap)
        assert isinstance(loss, Tensor)
        after_head = _now(device)
        torch.autograd.grad(loss, adapters)
        return middle - begin, after_head - middle, _now(device) - after_head, kept

    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(backends, set_priority=True):
        runs = [step() for _ in range(options.steps + 2)][2:]
        forward, head_time, backward, kept = (sorted(column)[len(runs) // 2] for column in zip(*runs, strict=True))
        count = len(layers)
        print(f"forward {forward / count * 1e3:.3f} ms a layer, backward {backward / count * 1e3:.3f} ms a layer")
        print(f"head with loss and its gradient {head_time * 1e3:.2f} ms, kept {kept / count / 2**20:.1f} MiB a layer")
        whole = (forward + backward) / count * shape.layers + head_time
        print(f"{shape.layers} layers and the head: {whole * 1e3:.1f} ms, {shape.tokens / whole:.0f} tokens/s")
        if options.profile:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=activities) as profile:
                step()
                _now(device)
            key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
            print(profile.key_averages().table(sort_by=key, row_limit=40, max_name_column_width=90))


if __name__ == "__main__":
    main()
