"""Times the generation engine: decoding by batch, with the first tokens of a new shape, and where a step's time goes.

    python kernels/bench/generation.py --batches 8 32 64 --cases merged unmerged nf4

Weights are random: a step takes the same time whatever it says. Each case is a model of Llama-3.1-8B's shape with an
adapter of rank 16 on all linear layers: merged into a copy, unmerged in the graph, or on an NF4 base (merged into a
dequantised copy; ``nf4-unmerged`` without one).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftkernels.sampling import GREEDY, Sampling, row_seed
from shapes import SHAPES, Shape

from ftcli.config import QuantizationConfig
from ftcli.facts.generation import cache_bytes
from ftcli.facts.precision import DtypePlan
from ftcli.generation.engine import Engine
from ftcli.generation.forward import cache_dtype, cache_shape
from ftcli.generation.generator import OpenedGenerator, open_generator
from ftcli.generation.requests import GenerationRequest
from ftcli.model.nf4 import nf4_linear
from ftcli.model.patch import patch

CASES = ("merged", "unmerged", "base", "nf4", "nf4-unmerged", "fp8")


@dataclass(frozen=True)
class Figures:
    """One case at one batch: seconds to the first tokens of a new shape; tokens a second, with prefill and without."""

    case: str
    batch: int
    first_seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float
    step_ms: float
    sampled_step_ms: float
    peak_gib: float
    merged: bool
    graphs: list[int]


def model_of(shape: Shape, case: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights of the shape, quantised and adapted as the case says, on the kernels."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.k_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    if case.startswith("nf4") or case == "fp8":
        quantise(model, "fp8" if case == "fp8" else "nf4")
    if case != "base":
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, device=device) * 0.01
    patch(model, "auto" if device.type == "cuda" else "reference")
    return model


def quantise(model: Any, method: str) -> None:
    """Puts the layers' linear weights into the method's storage."""
    from ftcli.model.fp8 import fp8_linear

    make = nf4_linear if method == "nf4" else fp8_linear
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.model.layers.set_submodule(name, make(module, QuantizationConfig(method=method), name))


def opened_for(
    model: Any, case: str, batch: int, longest: int, plan: DtypePlan, device: torch.device
) -> OpenedGenerator:
    """The engine, with a merged copy where the case is not without one."""
    room = None
    if case.endswith("unmerged"):
        room = cache_bytes(cache_shape(model, cache_dtype(model, plan)), batch, longest)
    return open_generator(model, plan, device, rows=batch, longest=longest, pad=0, own_settings=False, room_bytes=room)


def timed(engine: Any, requests: list[GenerationRequest], sampling: Sampling) -> tuple[float, float]:
    """Seconds from the first token to the last, and of all of it."""
    began = time.perf_counter()
    first = last = 0.0
    for _ in engine.run(requests, sampling):
        last = time.perf_counter()
        first = first or last
    return last - first, last - began


def measure(
    model: Any,
    case: str,
    batch: int,
    prompt: int,
    new: int,
    plan: DtypePlan,
    device: torch.device,
    profile: Path | None,
) -> Figures:
    generator = torch.Generator().manual_seed(0)
    requests = [
        GenerationRequest(
            tuple(torch.randint(5, model.config.vocab_size, (prompt,), generator=generator).tolist()),
            new,
            (row_seed(row),),
        )
        for row in range(batch)
    ]
    began = time.perf_counter()
    opened = opened_for(model, case, batch, prompt + new, plan, device)
    engine: Any = opened.generator
    assert isinstance(engine, Engine), opened.reason
    for token in engine.run(requests, GREEDY):
        if token.completion == 0 and token.request == batch - 1:
            break
    first = time.perf_counter() - began
    timed(engine, requests, GREEDY)
    timed(engine, requests, Sampling(1.0))
    decode, whole = timed(engine, requests, GREEDY)
    sampled, _ = timed(engine, requests, Sampling(1.0))
    if profile is not None:
        profiled(engine, requests, profile / f"{case}-{batch}.txt")
    on_gpu = device.type == "cuda"
    return Figures(
        case, batch, first, batch * new / whole, batch * (new - 1) / decode, 1e3 * decode / (new - 1),
        1e3 * sampled / (new - 1), torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        engine.layout.merged, engine.stepper.status.sizes,
    )  # fmt: skip


def profiled(engine: Any, requests: list[GenerationRequest], path: Path) -> None:
    """A table of the kernels of some steps, by their time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for at, _ in enumerate(engine.run(requests, Sampling(1.0))):
            if at > 20 * len(requests):
                break
        torch.cuda.synchronize()
    path.write_text(found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90))


def main() -> None:
    """Print one line of JSON a case and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3.1-8b", choices=list(SHAPES))
    parser.add_argument("--cases", nargs="+", default=["merged"], choices=CASES)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--no-tables", action="store_true", help="no tables of kernels: profiling takes seconds")
    parser.add_argument("--out", type=Path, help="a folder for the figures and for tables of kernels")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[options.model].tiny() if options.tiny else SHAPES[options.model]
    half = device.type == "cuda"
    compute = "bfloat16" if half else "float32"
    plan = DtypePlan(compute, "float32", compute, half, "a benchmark")
    figures = []
    for case in options.cases:
        model = model_of(shape, case, device, getattr(torch, compute))
        for batch in options.batches:
            found = measure(
                model,
                case,
                batch,
                options.prompt,
                options.new,
                plan,
                device,
                options.out if half and not options.no_tables else None,
            )
            figures.append(found)
            print(json.dumps(asdict(found)), flush=True)
            if half:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        del model
    if options.out:
        (options.out / "generation.json").write_text(json.dumps([asdict(one) for one in figures], indent=1))


if __name__ == "__main__":
    main()
