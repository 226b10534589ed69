"""A real lack of memory on one of two ranks: something else takes the memory of its GPU while it trains.

    python kernels/bench/shortage.py FOLDER [--gpus 2] [--engines ddp,fsdp]

``ftcli train recipes/llama3.1-8b-qlora.yaml --gpus 2`` on short rows, of which one batch of rank 1 is long. Once it
trains, another process takes what is left of that rank's GPU, so the long batch finds none. Both ranks have to end with
exit 5, one message that names rank and rows, and the finished steps in a checkpoint; the script's own status is 1 where
they did not. About a minute on 2 x H200. ``--gpus cpu`` runs two processes of the bundled tiny model, and limits the
memory of one by RLIMIT_AS. Writes FOLDER/shortage.json and what the commands print.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gpus import Run

#: Rows of the data, and the step (from 1) in which rank 1 meets long ones.
_ROWS, _STEP, _BATCH, _RANKS, _SEED = 1200, 60, 2, 2, 7
#: What is left of the rank's memory: less than anything that a long batch needs, enough to tell what has happened.
_LEFT_BYTES, _CHUNK_BYTES = 128 << 20, 64 << 20


def data(path: Path, long: int, short: int) -> list[int]:
    """Writes rows of ``short`` tokens but for the batch of rank 1 in step ``_STEP``; returns that batch's lines.

    The order is that of one source, without packing: :meth:`ftcli.data.order.Epochs.order`.
    """
    order = torch.randperm(_ROWS, generator=torch.Generator().manual_seed(_SEED)).tolist()
    first = ((_STEP - 1) * _RANKS + 1) * _BATCH
    chosen = order[first : first + _BATCH]
    lines = [json.dumps({"text": "a" * ((long if row in chosen else short) - 8)}) for row in range(_ROWS)]
    path.write_text("\n".join(lines) + "\n")
    return sorted(row + 1 for row in chosen)


def ballast() -> int:
    """Takes the memory of the first GPU when a line comes, until the input ends."""
    held = [torch.zeros(1, device="cuda")]
    print("ready", flush=True)
    sys.stdin.readline()
    while torch.cuda.mem_get_info()[0] > _LEFT_BYTES + _CHUNK_BYTES:
        held.append(torch.empty(_CHUNK_BYTES, dtype=torch.uint8, device="cuda"))
    print(torch.cuda.mem_get_info()[0], flush=True)
    sys.stdin.read()
    return 0


class Taken:
    """The memory of rank 1, taken away when asked."""

    def __init__(self, on_gpu: bool) -> None:
        self._process: subprocess.Popen[str] | None = None
        if on_gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, __file__, "--ballast", "-"],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": visible[1]},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def take(self, pid: int) -> int:
        """Bytes that are left."""
        if self._process is None:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize:"))
            resource.prlimit(pid, resource.RLIMIT_AS, (used + (_LEFT_BYTES >> 2), used + (_LEFT_BYTES >> 2)))
            return _LEFT_BYTES >> 2
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self._process.stdin.write("now\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def give_back(self) -> None:
        """Ends the other process."""
        if self._process is not None:
            self._process.communicate()


def measure(out: Path, recipe: str, engine: str, on_gpu: bool) -> dict[str, Any]:
    """How a run ends, and what of it is not as it has to be."""
    rows = out / "rows.jsonl"
    chosen = data(rows, *((8192, 64) if on_gpu else (1024, 64)))
    given = {
        "data.train": f"[{rows}]",
        "data.max_seq_len": "8192" if on_gpu else "1024",
        "data.packing": "false",
        "train.per_device_train_batch_size": str(_BATCH),
        "run.seed": str(_SEED),
        "launch.engine": engine,
        **({} if on_gpu else {"launch.num_processes": "2", "model.kernels": "reference"}),
    }
    words = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
    folder = out / f"run-{engine}"
    taken = Taken(on_gpu)
    run = Run(
        out,
        f"shortage-{engine}",
        recipe,
        (*words, "--output-dir", str(folder), "--max-steps", "200", *(("--gpus", "2") if on_gpu else ())),
    )
    begun = run.until("train 3/", 240.0)
    pid = run.rank(1)
    left = taken.take(pid) if pid is not None else None
    told = run.log.read_text(errors="replace")
    reached = max((int(step) for step in re.findall(r"train (\d+)/", told)), default=0)
    found = run.ended(120.0)
    taken.give_back()
    said = run.log.read_text(errors="replace")
    kept = folder / "checkpoints"
    checkpoints = sorted(path.name for path in kept.iterdir()) if kept.is_dir() else []
    status = json.loads((folder / "status.json").read_text()) if (folder / "status.json").exists() else {}
    holds = {
        "memory was taken before the long batch came": left is not None and reached < _STEP,
        "exit 5": found["exit"] == 5,
        "one message": said.count("error[") == 1,
        "it is FT703 and names rank 1": bool(re.search(r"error\[FT703\]: rank 1: out of memory", said)),
        "it names the rows": f"rows.jsonl:{', '.join(map(str, chosen))})" in said,
        "the finished steps are saved": f"step-{_STEP - 1:08d}" in checkpoints,
        "status.json says failed, exit 5": (status.get("state"), status.get("exit_code")) == ("failed", 5),
        "one checkpoint to go on from is named": said.count("--resume") == 1,
        "no traceback": "Traceback" not in said,
    }
    more = {"rows": chosen, "left_bytes": left, "reached": reached, "first": begun, "checkpoints": checkpoints}
    return {"missed": [name for name, held in holds.items() if not held], **found, **more}


def main() -> int:
    """Measures each engine; 1 where an end was not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", default="2", choices=("2", "cpu"))
    parser.add_argument("--engines", default="ddp,fsdp")
    parser.add_argument("--ballast", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.ballast:
        return ballast()
    out: Path = asked.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    on_gpu = asked.gpus != "cpu"
    recipe = "recipes/llama3.1-8b-qlora.yaml" if on_gpu else "recipes/smoke.yaml"
    found = {engine: measure(out, recipe, engine, on_gpu) for engine in asked.engines.split(",")}
    (out / "shortage.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found))
    return int(any(each["missed"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
