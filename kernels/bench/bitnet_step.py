"""Whole training steps of BitNet's 2B-4T shape with its linear layers in three forms, all else the same.

    python kernels/bench/bitnet_step.py --rows 4 --steps 5
    python kernels/bench/bitnet_step.py --tiny --forms ours eager          # on a CPU, to see that it runs

Forms: ``ours``; ``eager``, the same formulas as plain torch operations on float32 masters under autocast, every pass
rounding weights anew, as trainers without kernels do; ``transformers``, its ``AutoBitLinear`` with online quantisation,
whose rounding it compiles. Each is a step of forward, backward and fused AdamW on rows of random tokens, without
gradient checkpointing; the time is the median of the steps after the first two, the memory the allocator's peak from
the third on. The aim is 1.4 times ``eager``, and less memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftkernels.bitlinear import bit_linear_reference
from ftkernels.ternary import ternarise

from ftcli.config import QuantizationConfig
from ftcli.facts.config_file import bundled_configs
from ftcli.model.bitnet import BitLinear, round_in_norms
from ftcli.model.load import config_of
from ftcli.model.load_quantized import ModelStorage, random_quantized
from ftcli.model.loss import forward_loss

MODEL = "microsoft/bitnet-b1.58-2B-4T-bf16"
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
}  # fmt: skip
AIM = 1.4


class FakeQuantised(nn.Linear):
    """``bit_linear_reference`` as a layer: weights are rounded in each pass."""

    def __init__(self, masters: nn.Parameter) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = masters.shape
        self.weight = masters
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        return bit_linear_reference(x, self.weight, None, ternarise(self.weight))


def of_transformers(masters: nn.Parameter) -> nn.Module:
    """transformers' own layer."""
    from transformers.integrations.bitnet import AutoBitLinear

    rows, columns = masters.shape
    layer: nn.Module = AutoBitLinear(columns, rows, bias=False, device=torch.device("meta"), online_quant=True)
    layer.weight = masters
    return layer


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, its loss, and bytes: before the first step, and the peak."""

    seconds: float
    loss: float
    weights: int
    peak: int


def build(form: str, device: torch.device, raw: dict[str, Any]) -> Any:
    """The model with its linear layers in one form, the same random weights in each."""
    holding = ModelStorage(QuantizationConfig(method="bitnet"), torch.float32, device, trained=True)
    model = random_quantized(config_of(raw), holding, "sdpa", 0)
    if form == "ours":
        round_in_norms(model, kernels=True)
    else:
        for name, module in list(model.named_modules()):
            if isinstance(module, BitLinear):
                made = FakeQuantised if form == "eager" else of_transformers
                model.set_submodule(name, made(module.weight))
    return model.train()


def measure(model: Any, device: torch.device, options: argparse.Namespace) -> Measured:
    """Runs the steps."""
    on_gpu = device.type == "cuda"
    held = torch.cuda.memory_allocated() if on_gpu else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    generator = torch.Generator().manual_seed(0)
    times, loss = [], torch.zeros(())
    for step in range(2 + options.steps):
        ids = torch.randint(3, 250, (options.rows, options.seq), generator=generator).to(device)
        if on_gpu:
            torch.cuda.synchronize()
            if step == 2:
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = forward_loss(model, {"input_ids": ids, "labels": ids}, num_items=ids.numel()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return Measured(statistics.median(times[2:]), float(loss.detach()), held, peak)


def profiled(model: Any, device: torch.device, options: argparse.Namespace) -> str:
    """The kernels of one forward and backward pass, by time."""
    ids = torch.randint(3, 250, (options.rows, options.seq), device=device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA][: 1 + (device.type == "cuda")]
    with torch.profiler.profile(activities=kinds) as profile, torch.autocast(device.type, torch.bfloat16):
        forward_loss(model, {"input_ids": ids, "labels": ids}, num_items=ids.numel()).loss.backward()
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=70))


def main() -> None:
    """A line a form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of this many layers")
    parser.add_argument("--forms", nargs="+", default=["ours", "eager", "transformers"])
    parser.add_argument("--profile", action="store_true", help="of our form, the kernels by time")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.tiny else "cpu")
    folder, _ = bundled_configs()[MODEL]
    raw = json.loads((folder / "config.json").read_text())
    if options.tiny:
        raw, options.rows, options.seq = {**raw, **TINY}, 2, 32
    if options.layers:
        raw["num_hidden_layers"] = options.layers
    found: dict[str, Measured] = {}
    for form in options.forms:
        model = None
        try:
            model = build(form, device, raw)
            found[form] = measure(model, device, options)
            if options.profile and form == "ours":
                print(profiled(model, device, options))
        except torch.OutOfMemoryError as error:
            print(f"{form}: out of memory: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        finally:
            del model
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        it, ours = found[form], found.get("ours")
        rate = options.rows * options.seq / it.seconds
        against = "" if ours is None or form == "ours" else (
            f"; ours is {it.seconds / ours.seconds:.2f} times as fast and takes {ours.peak / max(it.peak, 1):.2f} of it"
        )  # fmt: skip
        print(
            f"{form}: {1e3 * it.seconds:.1f} ms a step of {options.rows} x {options.seq}, {rate:.0f} tokens/s, "
            f"peak {it.peak / 2**30:.2f} GiB (weights {it.weights / 2**30:.2f}), loss {it.loss:.4f}{against}",
            flush=True,
        )
    if {"ours", "eager"} <= set(found):
        reached = found["eager"].seconds >= AIM * found["ours"].seconds
        print(f"aim: {AIM} times eager: {'reached' if reached else 'NOT reached'}")


if __name__ == "__main__":
    main()
