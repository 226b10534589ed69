"""Measures weights that are spread over the GPUs of one host (``launch.engine: fsdp``): steps, start-up, a killed rank.

    python kernels/bench/spread.py FOLDER [--gpus 2] [--only full8b,qlora70b,...] [--steps 4] [--layers N]

Writes FOLDER/spread.json and what the commands print. Random weights of the true shapes; about four minutes on
2 x H200. ``--gpus cpu`` runs two processes of the bundled tiny model on a CPU, to try the script.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpus import TINY, Run, bench

_EIGHT, _SEVENTY, _QLORA = (f"recipes/llama3.1-{name}.yaml" for name in ("8b", "70b-qlora", "8b-qlora"))
_SPREAD = ("--set", "launch.engine=fsdp")
_AGAIN = ("--set", "train.gradient_checkpointing=true")


def losses(run: Path) -> list[Any]:
    """Loss and gradient norm of each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [[line.get("loss"), line.get("grad_norm")] for line in map(json.loads, lines) if "loss" in line]


def start(out: Path, name: str, recipe: str, words: Sequence[str], steps: int = 5) -> dict[str, Any]:
    """Seconds until the first step is told, and the losses of a short run."""
    run = Run(out, name, recipe, ("--output-dir", str(out / name), "--max-steps", str(steps), *words))
    first = run.until("train 1/", 240.0)
    return {"first_step": first, **run.ended(180), "losses": losses(out / name)}


def killed(out: Path, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """How a run ends of which rank 1 is killed."""
    run = Run(out, "killed", recipe, ("--output-dir", str(out / "run-killed"), "--max-steps", "4000", *words))
    run.until("train 5/", 240.0)
    pid = run.rank(1)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    kept = out / "run-killed" / "checkpoints"
    found = run.ended(90)
    return {**found, "killed": pid, "checkpoints": sorted(p.name for p in kept.iterdir()) if kept.is_dir() else []}


def main() -> int:
    """Measures what is asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="2")
    parser.add_argument("--only", default="full8b,qlora70b,start,killed")
    parser.add_argument("--steps", default="4")
    parser.add_argument("--layers", default=None)
    parser.add_argument("--recipe", default=None, help="in place of all recipes, to try the script")
    asked = parser.parse_args()
    out: Path = asked.folder
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    several = ("--gpus", asked.gpus) if asked.gpus != "cpu" else ("--set", "launch.num_processes=2")
    spread = (*several, *_SPREAD, "--debug")
    shorter = ("--layers", asked.layers) if asked.layers else ()
    cpu = asked.gpus == "cpu"
    recipe = asked.recipe or ("recipes/smoke.yaml" if cpu else None)
    eight, seventy, qlora = (recipe or each for each in (_EIGHT, _SEVENTY, _QLORA))
    steps = ("--steps", asked.steps, *(TINY if cpu else ()))
    work = {
        "full8b": lambda: bench(out, "full8b", eight, ("--set", "lora=null", *steps, *shorter, *spread)),
        "qlora70b": lambda: bench(out, "qlora70b", seventy, (*_AGAIN, *steps, *shorter, *spread)),
        "qlora70b_ddp": lambda: bench(
            out, "qlora70b_ddp", seventy, (*_AGAIN, *steps, *shorter, *several, "--set", "launch.engine=ddp")
        ),
        "lora8b": lambda: bench(out, "lora8b", eight, (*steps, *shorter, *spread)),
        "start": lambda: start(out, "start-spread", qlora, spread),
        "start_ddp": lambda: start(out, "start-ddp", qlora, (*several, "--set", "launch.engine=ddp")),
        "start_one": lambda: start(out, "start-one", qlora, ("--set", "train.gradient_accumulation_steps=2")),
        "full2b": lambda: start(
            out,
            "full2b",
            recipe or "recipes/gemma2-2b.yaml",
            ("--set", "lora=null", "--set", "checkpoint.every_steps=2", "--set", "export.formats=[]", *spread),
            3,
        ),
        "killed": lambda: killed(out, qlora, spread),
    }
    for name in asked.only.split(","):
        began = time.perf_counter()
        found[name] = {**work[name](), "all_seconds": time.perf_counter() - began}
        (out / "spread.json").write_text(json.dumps(found, indent=1))
        sys.stdout.write(json.dumps({name: found[name]}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
