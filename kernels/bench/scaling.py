"""What N GPUs of one host achieve: training with adapters, full fine-tuning, a 70B base, rollouts, preemption.

    python kernels/bench/scaling.py FOLDER [--gpus 8] [--only lora,full,70b,rollouts,resume] [--steps 4] [--profile]

Random weights of the true shapes, 2 x 4096 tokens a GPU. Five minutes on 2 x H200, and within ten on eight. Writes
FOLDER/scaling.json and what the commands print. ``--gpus cpu`` is two processes of a small model, to try the script.
``--profile`` records a further step of each kind: its kernels by time, and how long rank 0's GPU worked in it.
NVLink multicast is not needed, and stays as the environment has it (NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus import TINY, Run, bench

_EIGHT, _SEVENTY = "recipes/llama3.1-8b.yaml", "recipes/llama3.1-70b-qlora.yaml"
#: Completions that are generated at a time on each GPU.
_ROLLOUTS = 64


@dataclass(frozen=True)
class Asked:
    """What is to be measured: on ``gpus`` GPUs by the command line's ``spread`` words, into ``out``."""

    out: Path
    gpus: int
    spread: tuple[str, ...]
    steps: tuple[str, ...]
    recipe: str | None
    tiny: bool


def _each(found: dict[str, Any]) -> float | None:
    in_all = (found.get("several") or {}).get("tokens_per_second_in_all")
    return None if in_all is None else in_all / found["several"]["gpus"]


def _row(what: str, value: float | None, aim: float, unit: str, **more: Any) -> dict[str, Any]:
    return {"what": what, "value": value, "aim": aim, "unit": unit, **more}


def lora(asked: Asked) -> list[dict[str, Any]]:
    """Training with adapters: all GPUs together over as many times one of them alone, which is measured first."""
    recipe = asked.recipe or _EIGHT
    one = bench(asked.out, "lora-one", recipe, asked.steps)
    together = bench(asked.out, "lora-all", recipe, (*asked.steps, *asked.spread))
    alone, each = one["tokens_per_second"], _each(together)
    share = None if alone is None or each is None else each / alone
    return [
        _row("8B LoRA, DDP: share of as many single GPUs", share, 0.97, "", one=one, together=together),
        _row("8B LoRA, DDP: tokens/s in all", None if each is None else each * asked.gpus, 16_000.0 * asked.gpus, ""),
    ]


def full(asked: Asked) -> list[dict[str, Any]]:
    """Full fine-tuning with the weights spread over the GPUs."""
    words = ("--set", "lora=null", "--set", "launch.engine=fsdp", *asked.steps, *asked.spread)
    found = bench(asked.out, "full", asked.recipe or _EIGHT, words)
    return [_row("8B full, FSDP2: tokens/s a GPU", _each(found), 8_200.0, "", found=found)]


def seventy(asked: Asked) -> list[dict[str, Any]]:
    """Adapters on a 70B base in NF4, spread over the GPUs, whole layers run again."""
    words = ("--set", "train.gradient_checkpointing=true", "--set", "launch.engine=fsdp", *asked.steps, *asked.spread)
    words += ("--set", "quantization.method=nf4") if asked.tiny else ("--steps", "3")  # of six seconds each
    found = bench(asked.out, "70b", asked.recipe or _SEVENTY, words)
    return [_row("70B NF4, FSDP2: tokens/s a GPU", _each(found), 1_200.0, "", found=found)]


def rollouts(asked: Asked) -> list[dict[str, Any]]:
    """Completions: an engine on each GPU at the same time, over as many times one of them alone."""
    alone = _generate(asked, [0])
    together = _generate(asked, list(range(asked.gpus)))
    share = sum(together) / (asked.gpus * alone[0]) if alone and len(together) == asked.gpus else None
    return [_row("rollouts: share of as many single GPUs", share, 0.95, "", alone=alone, together=together)]


def _generate(asked: Asked, gpus: Sequence[int]) -> list[float]:
    """Tokens a second of each, prompts included."""
    command = [sys.executable, str(Path(__file__).with_name("generation.py")), "--cases", "merged", "--no-tables"]
    command += ["--batches", "2", "--tiny"] if asked.tiny else ["--batches", str(_ROLLOUTS)]
    with (asked.out / f"rollouts-{len(gpus)}.log").open("wb") as log:
        running = [
            subprocess.Popen(  # noqa: S603
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            for gpu in gpus
        ]
        said = [each.communicate()[0] for each in running]
    lines = [line for text in said for line in text.splitlines() if line.startswith("{")]
    return [float(json.loads(line)["tokens_per_second"]) for line in lines]


def resume(asked: Asked) -> list[dict[str, Any]]:
    """Seconds to the first step on one GPU and on all; a run on all that is preempted goes on with half of them."""
    recipe = asked.recipe or _EIGHT
    one = Run(asked.out, "start-one", recipe, ("--output-dir", str(asked.out / "one"), "--max-steps", "2"))
    first_alone = one.until("train 1/", 240.0)
    one.ended()
    place = ("--output-dir", str(asked.out / "preempted"), "--max-steps", "24" if asked.tiny else "60")
    begun = Run(asked.out, "preempted", recipe, (*place, *asked.spread))
    first = begun.until("train 1/", 240.0)
    begun.until("train 4/")
    begun.process.send_signal(signal.SIGTERM)
    stopped = begun.ended()
    fewer = max(1, asked.gpus // 2)
    words = () if fewer == 1 else ("--gpus", str(fewer))
    again = Run(asked.out, "resumed", recipe, (*place, *words))
    resumed = again.until("resum", 240.0)
    ended = again.ended(240.0)
    return [
        _row("seconds to the first step beyond one GPU's", first - first_alone, 5.0, "at most", of_one=first_alone),
        _row(f"exit of the preempted run (75), then with {fewer} of the GPUs (0)", stopped["exit"], 75.0, "exactly"),
        _row(f"exit of the run that went on with {fewer}", ended["exit"], 0.0, "exactly", said=ended, told=resumed),
    ]


_PARTS: dict[str, Callable[[Asked], list[dict[str, Any]]]] = {
    "lora": lora,
    "full": full,
    "70b": seventy,
    "rollouts": rollouts,
    "resume": resume,
}


def _met(row: dict[str, Any]) -> str:
    value, aim = row["value"], row["aim"]
    if value is None:
        return "not measured"
    met = value == aim if row["unit"] == "exactly" else value <= aim if row["unit"] == "at most" else value >= aim
    return "met" if met else "missed"


def main() -> int:
    """Measures part after part; what fails is left out of the table, and its output says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="8")
    parser.add_argument("--only", default=",".join(_PARTS))
    parser.add_argument("--steps", default="4")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipe", help="in place of all recipes, to try the script")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    cpu = given.gpus == "cpu"
    spread = ("--set", "launch.num_processes=2") if cpu else ("--gpus", given.gpus)
    steps = ("--steps", given.steps, *(("--profile",) if given.profile else ()), *(TINY if cpu else ()))
    recipe = given.recipe or ("recipes/smoke.yaml" if cpu else None)
    asked = Asked(given.folder, 2 if cpu else int(given.gpus), spread, steps, recipe, tiny=cpu)
    rows: list[dict[str, Any]] = []
    for name in given.only.split(","):
        began = time.perf_counter()
        for row in _PARTS[name](asked):
            rows.append(row)
            shown = "none" if row["value"] is None else f"{row['value']:,.4g}"
            print(f"| {row['what']} | {shown} | {row['unit']} {row['aim']:,g} | {_met(row)} |", flush=True)
            (given.folder / "scaling.json").write_text(json.dumps(rows, indent=1))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
