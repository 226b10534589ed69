"""Full fine-tuning by transformers with Liger's kernels, beside `ftcli bench` of the same shape on the same machine.

    pip install liger-kernel==0.8.5
    python kernels/bench/peer.py recipes/qwen3-8b.yaml --model Qwen/Qwen3-4B
    python kernels/bench/peer.py recipes/qwen3-8b.yaml --model Qwen/Qwen3-4B --pure-bf16

The model of transformers with random weights, patched by Liger's own function for its kind (norms, rotation, gated
unit, head with loss), torch's attention, gradient norm clipped to 1, torch's fused AdamW: float32 parameters under
bfloat16 autocast, or everything in bfloat16, AdamW's moments included. A bare loop, without what a trainer adds. Prints
the median step, tokens/s and the peak of torch's allocator as one JSON line. `--plain` leaves Liger out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ftcli.config.load import Override, load_recipe
from ftcli.facts.model import read_facts
from ftcli.model.load import config_of


def build(recipe: Path, settings: list[str], *, liger: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """The recipe's model with random weights."""
    loaded = load_recipe(recipe, [Override(text, f"--set {text}") for text in ("model.init=random", *settings)])
    config = config_of(read_facts(loaded.recipe.model, offline=True, origins=loaded.origins).raw)
    if liger:
        apply = f"apply_liger_kernel_to_{config.model_type}"
        getattr(import_module("liger_kernel.transformers"), apply)()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.train()


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    """One step of training; the loss."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def main() -> None:
    """Times some steps after the first two, in each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--model", help="in place of the recipe's model.name_or_path")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pure-bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if given.pure_bf16 else torch.float32
    for _ in range(given.runs):
        print(json.dumps(run(given, device, dtype)), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run(given: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """One run, with a model of its own: what is printed."""
    settings = [] if given.model is None else [f"model.name_or_path={given.model}"]
    model = build(given.recipe, settings, liger=not given.plain, dtype=dtype, device=device)
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(model.config.vocab_size, (given.batch, given.seq), device=device)
    events = []
    for _ in range(given.steps + 2):
        loss = step(model, optimizer, ids, autocast=not given.pure_bf16)
        if device.type == "cuda":
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
    found: dict[str, Any] = {
        "model": given.model or str(given.recipe),
        "liger": not given.plain,
        "pure_bf16": given.pure_bf16,
    }
    found |= {"checkpointing": given.checkpointing, "loss": float(loss)}
    if events:
        torch.cuda.synchronize()
        ms = statistics.median(a.elapsed_time(b) for a, b in pairwise(events[1:]))
        found |= {"step_ms": ms, "tokens_per_second": 1000 * given.batch * given.seq / ms}
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


if __name__ == "__main__":
    main()
