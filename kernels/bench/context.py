"""Rows that several GPUs share: how much longer they can be, and how fast they are.

    python kernels/bench/context.py FOLDER [--gpus 2] [--budget-gib 24] [--length 32768] [--recipe RECIPE]

Steps by `ftcli bench`, each one row a step with whole layers run again, and torch's allocator held to the budget
where it can be: the longest row that the memory estimate gives one GPU; the longest that it gives all of them together;
and one length on one GPU and on all. Writes FOLDER/context.json, and prints the same: 2.5 minutes on 2 x H200.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftcli.config.load import load_recipe
from ftcli.config.overrides import Override
from ftcli.facts.device import named_device, probe_device
from ftcli.facts.model import read_facts
from ftcli.plan.memory.estimate import estimate_memory
from ftcli.plan.run import RunPlan
from ftcli.tables import methods

GIB = 2**30
#: Rows are multiples of this.
STEP = 2048


def settings(shared: int) -> list[str]:
    values = ["train.gradient_checkpointing=true", "data.packing=false", "data.eval=[]"]
    return [*values, f"launch.num_processes={shared}", f"launch.context_parallel_size={shared}"]


def longest(recipe: Path, shared: int, budget_gib: float, device: str | None) -> int:
    """Tokens of the longest row whose estimate stays within the budget."""
    loaded = load_recipe(recipe, [Override(text=text, label=text) for text in settings(shared)])
    facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
    machine = probe_device() if device is None else named_device(device)
    device_free = replace(machine, free_bytes=int(budget_gib * GIB))
    plan = RunPlan(loaded.recipe, facts, device_free, "train", methods.row("sft"))
    plan = plan.changed(
        {
            "train.gradient_checkpointing": True,
            "train.per_device_train_batch_size": 1,
            "train.gradient_accumulation_steps": 1,
        }
    )

    def fits(steps: int) -> bool:
        estimate = estimate_memory(plan.changed({"data.max_seq_len": steps * STEP}))
        return estimate is not None and estimate.allocated_bytes <= budget_gib * GIB

    low, high = 1, 4096
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def bench(recipe: Path, shared: int, length: int, steps: int, budget_gib: float | None, out: Path) -> dict[str, Any]:
    """What `ftcli bench` finds; with a budget, more memory cannot be had."""
    words = [sys.executable, "-m", "ftcli", "bench", str(recipe), "--batch", "1", "--seq", str(length)]
    words += ["--steps", str(steps), "--json"]
    for text in settings(shared):
        words += ["--set", text]
    environment = dict(os.environ)
    if budget_gib is not None:
        share = f"per_process_memory_fraction:{budget_gib / _device_gib():.4f}"
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:True,{share}"
    if shared > 1:
        words += ["--gpus", str(shared)]
    done = subprocess.run(words, capture_output=True, env=environment, check=False)  # noqa: S603
    (out / f"{shared}x{length}.log").write_bytes(done.stderr)
    try:
        found = json.loads(done.stdout).get("result") or {}
    except ValueError:
        found = {}
    several = found.get("several") or {}
    return {
        "gpus": shared,
        "length": length,
        "exit": done.returncode,
        "tokens_per_second_in_all": several.get("tokens_per_second_in_all", found.get("tokens_per_second")),
        "step_seconds": None if not found else found["step_ms"] / 1e3,
        "peak_gib": None if not found else found["peak_memory_bytes"] / GIB,
        "predicted_gib": None if not found else (found.get("predicted_allocated_bytes") or 0) / GIB,
    }


def _device_gib() -> float:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 1e9


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--budget-gib", type=float, default=24.0)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/llama3.1-8b-qlora.yaml"))
    parser.add_argument("--only", choices=("longest", "length"), help="one half of it")
    parser.add_argument("--as", dest="device", help="only print the longest rows on this GPU")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    most = {shared: longest(asked.recipe, shared, asked.budget_gib, asked.device) for shared in (1, asked.gpus)}
    print(f"within {asked.budget_gib} GiB: {most[1]:,} tokens on one GPU, {most[asked.gpus]:,} on {asked.gpus}")
    print(f"that is {most[asked.gpus] / most[1]:.2f} times as long")
    if asked.device is not None:
        return 0
    rows = []
    cases: list[tuple[int, int, int, float | None]] = []
    if asked.only != "length":
        cases += [(shared, most[shared], 0, asked.budget_gib) for shared in (1, asked.gpus)]
    if asked.only != "longest":
        cases += [(shared, asked.length, 2, None) for shared in (1, asked.gpus)]
    for shared, length, steps, budget in cases:
        rows.append(bench(asked.recipe, shared, length, steps, budget, asked.folder))
        print(json.dumps(rows[-1]), flush=True)
        (asked.folder / "context.json").write_text(json.dumps({"longest": most, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
