"""Measures several GPUs of one host: their training step, how long a run takes to start, and how it stops and fails.

    python kernels/bench/gpus.py FOLDER [--gpus 2] [--recipe recipes/llama3.1-8b.yaml] [--layers N] [--steps 12]

Writes FOLDER/gpus.json and what the commands print. About three minutes on 2 x H200 for Llama-3.1-8B. NVLink multicast
is not needed, and stays as the environment has it (NCCL_NVLS_ENABLE).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: `ftcli bench` in a size for two CPU cores, on the kernels' plain form: weights that are spread have to be on them.
TINY = ("--batch", "2", "--seq", "64", "--set", "model.kernels=reference")
_RANDOM = (
    "--set",
    "model.init=random",
    "--set",
    "model.tokenizer=bytes",
    "--set",
    "data.eval=[]",
    "--set",
    "eval.every_steps=null",
    "--offline",
)
_SMALL = (
    "--set",
    "logging.every_steps=1",
    "--set",
    "train.gradient_accumulation_steps=1",
    "--set",
    "data.max_seq_len=512",
    "--resume",
    "auto",
)


def bench(out: Path, name: str, recipe: str, words: Sequence[str]) -> dict[str, Any]:
    """The result of `ftcli bench` at 2 x 4096 tokens a GPU."""
    command = [sys.executable, "-m", "ftcli", "bench", recipe, "--batch", "2", "--seq", "4096", "--json", *words]
    began = time.perf_counter()
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)  # noqa: S603
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    try:
        found: dict[str, Any] = json.loads(answer).get("result") or {}
    except ValueError:
        found = {}
    kept = ("tokens_per_second", "step_ms", "peak_memory_bytes", "device_used_bytes", "peak_reserved_bytes", "several")
    kept += ("predicted_allocated_bytes", "predicted_peak_bytes", "cuda_graphs", "kernels", "step_ms_max")
    kept += ("profile", "gpu_time")
    host = {"host_peak_bytes": used.ru_maxrss << 10}  # of its largest process
    return {"exit": process.returncode, "wall": time.perf_counter() - began, **host, **{k: found.get(k) for k in kept}}


class Run:
    """A run of `ftcli train` whose output is read as it comes."""

    def __init__(self, out: Path, name: str, recipe: str, words: Sequence[str]) -> None:
        self.began = time.perf_counter()
        self.log = out / f"{name}.log"
        with self.log.open("wb") as log:
            command = [sys.executable, "-m", "ftcli", "train", recipe, *_RANDOM, *_SMALL, *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603

    def until(self, word: str, seconds: float = 120.0) -> float:
        """Seconds since the start until ``word`` is printed; infinity when it never is."""
        while time.perf_counter() - self.began < seconds:
            if word in self.log.read_text(errors="replace"):
                return time.perf_counter() - self.began
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        return float("inf")

    def rank(self, number: int) -> int | None:
        """The pid of a rank."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                child = f"PPid:\t{self.process.pid}\n" in (folder / "status").read_text()
                if child and f"RANK={number}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    return int(folder.name)
        return None

    def ended(self, seconds: float = 60.0) -> dict[str, Any]:
        """Exit status, seconds until then, and what was said last."""
        began = time.perf_counter()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        said = self.log.read_text(errors="replace").strip().splitlines()[-4:]
        return {"exit": self.process.wait(), "seconds": time.perf_counter() - began, "said": said}


def main() -> int:
    """Measures everything, one after the other; what fails is left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="2")
    parser.add_argument("--recipe", default="recipes/llama3.1-8b.yaml")
    parser.add_argument("--layers", default=None)
    parser.add_argument("--steps", default="12")
    asked = parser.parse_args()
    out: Path = asked.folder
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"nvls": os.environ.get("NCCL_NVLS_ENABLE")}
    spread = ("--gpus", asked.gpus) if asked.gpus != "cpu" else ("--set", "launch.num_processes=2")
    shorter = ("--layers", asked.layers) if asked.layers else ()

    def keep(name: str, value: Any) -> None:
        found[name] = value
        (out / "gpus.json").write_text(json.dumps(found, indent=1))

    keep("together", bench(out, "together", asked.recipe, ("--steps", asked.steps, *shorter, *spread)))
    run = Run(out, "first", asked.recipe, ("--output-dir", str(out / "run0"), "--max-steps", "60"))
    keep("first_step_of_one", run.until("train 1/"))
    run.process.send_signal(signal.SIGINT)
    keep("interrupted", run.ended())
    run = Run(out, "stopped", asked.recipe, ("--output-dir", str(out / "run"), "--max-steps", "60", *spread))
    keep("first_step_of_several", run.until("train 1/"))
    run.until("train 5/")
    run.process.send_signal(signal.SIGTERM)
    keep("stopped", run.ended())
    run = Run(out, "alone", asked.recipe, ("--output-dir", str(out / "run"), "--max-steps", "60"))
    keep("resumed_by_one", run.until("train 7/"))
    run.process.send_signal(signal.SIGINT)
    keep("went_on_alone", run.ended())
    run = Run(out, "killed", asked.recipe, ("--output-dir", str(out / "run2"), "--max-steps", "4000", *spread))
    run.until("train 8/")
    pid = run.rank(1)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    keep("killed", run.ended(90))
    keep("alone", bench(out, "one", asked.recipe, ("--steps", asked.steps, *shorter)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
