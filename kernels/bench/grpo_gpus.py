"""GRPO on several GPUs against the same run on one that accumulates as much more: numbers of each step, and seconds.

    python kernels/bench/grpo_gpus.py FOLDER [--gpus 2|cpu] [--recipe FILE] [--steps 4] [--no-alone] [KEY=VALUE ...]

Each run is `ftcli grpo` from its start to its result. Prints a line for each step of both, what they say of their end,
and the largest difference of a trained weight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

_TOLD = ("loss", "reward", "reward_std", "grad_norm", "entropy")


def run(out: Path, name: str, recipe: str, steps: int, changes: list[str]) -> Path:
    """The directory of a run, after its end."""
    folder = out / name
    words = [f"run.output_dir={folder}", "logging.every_steps=1", "eval.tasks=[]", "eval.every_steps=null", *changes]
    command = [sys.executable, "-m", "ftcli", "grpo", recipe, "--max-steps", str(steps), "--resume", "never"]
    command += ["--offline", *(word for change in words for word in ("--set", change))]
    began = time.perf_counter()
    with (out / f"{name}.log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, check=False)  # noqa: S603
    print(f"{name}: exit {done.returncode} after {time.perf_counter() - began:.1f} s")
    if done.returncode:
        print((out / f"{name}.log").read_text(errors="replace")[-3000:])
    return folder


def main() -> int:
    """Runs both and compares them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="2")
    parser.add_argument("--recipe", default="recipes/smoke-grpo.yaml")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulated", type=int, default=1, help="micro-batches of a rank in a step")
    parser.add_argument("--alone", action=argparse.BooleanOptionalAction, default=True, help="also on one GPU")
    parser.add_argument("changes", nargs="*")
    asked = parser.parse_args()
    out: Path = asked.folder.absolute()
    out.mkdir(parents=True, exist_ok=True)
    ranks = 2 if asked.gpus == "cpu" else int(asked.gpus)

    def one(name: str, processes: int) -> Path:
        accumulated = asked.accumulated * ranks // processes
        more = [f"launch.num_processes={processes}", f"train.gradient_accumulation_steps={accumulated}"]
        return run(out, name, asked.recipe, asked.steps, [*asked.changes, *more])

    runs = [one("together", ranks), *([one("alone", 1)] if asked.alone else [])]
    for folder in runs:
        path = folder / "metrics.jsonl"
        for line in map(json.loads, path.read_text().splitlines()) if path.exists() else ():
            if "loss" in line:
                told = {key: value for key, value in line.items() if key in _TOLD}
                seconds = {key: round(value, 3) for key, value in line.items() if key.startswith("seconds/")}
                print(folder.name, line["step"], told, seconds, f"{line['peak_memory_bytes'] / 2**30:.2f} GiB")
    results = [load_file(next(folder.glob("*/*.safetensors"))) for folder in runs if (folder / "status.json").exists()]
    if len(results) == 2:
        apart = max(float((results[0][name] - value).abs().max()) for name, value in results[1].items())
        largest = max(float(value.abs().max()) for value in results[1].values())
        print(f"largest difference of a weight {apart:.3g}, of {largest:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
