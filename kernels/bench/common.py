"""Shared by the measurements of this folder: arguments, tables, JSON, and `ftcli` as a process. Imports no torch."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
sys.path[1:1] = [str(ROOT), str(ROOT / "kernels")]  # so that the scripts run from a checkout that is not installed
GIB = 2**30
#: Shape of an `ftcli bench` on two CPU cores; sharded weights need the kernels' reference form there.
TINY_STEP = ("--batch", "2", "--seq", "64", "--set", "model.kernels=reference")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The script's docstring as its help, with the options that every measurement takes."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a tiny case, to see that it runs")
    made.add_argument("--json", type=Path, help="also write the rows and the machine to this file")
    return made


def gpu() -> str | None:
    """The first GPU's name as the driver gives it; None without one."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return None


def require_device(device: str) -> None:
    """Ends the script with one line where CUDA was asked for and there is none."""
    if device == "cuda" and gpu() is None:
        raise SystemExit("no CUDA GPU here: --device cpu runs a tiny case, whose times mean nothing")


@dataclass
class Table:
    """Rows that are printed as they come, in Markdown. ``columns`` are names and format specifications."""

    columns: Mapping[str, str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        """Prints a row, and the head before the first; what has no column only goes into the JSON."""
        if not self.rows:
            print("| " + " | ".join(self.columns) + " |\n|" + "---|" * len(self.columns), flush=True)
        self.rows.append(values)
        cells = ["" if values.get(n) is None else format(values[n], spec) for n, spec in self.columns.items()]
        print("| " + " | ".join(cells) + " |", flush=True)

    def save(self, path: Path | None) -> None:
        """Writes all rows beside what they were measured on; nothing without a path."""
        if path is not None:
            kept = {**machine(), "rows": self.rows}
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The command, the day, the GPU or processor, and the versions that a time depends on."""
    found = {"command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"), "device": gpu() or platform.machine()}
    for package in ("torch", "triton", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class Answer:
    """The end of an `ftcli` command: status, its ``result`` under --json, last message, seconds, largest process."""

    status: int
    result: dict[str, Any]
    said: str
    seconds: float
    host_peak_bytes: int


def ftcli(words: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None) -> Answer:
    """Runs an `ftcli` command in a process; messages go into ``log`` where one is given."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        command = [sys.executable, "-m", "ftcli", *words]
        process = subprocess.Popen(command, stdout=out, stderr=said, env={**os.environ, **(env or {})})  # noqa: S603
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said.seek(0)
        answer, text = out.read(), said.read()
    if log is not None:
        log.write_text(f"{text}\n{answer}", encoding="utf-8")
    try:
        result = json.loads(answer).get("result") or {}
    except ValueError:
        result = {}
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((line for line in lines if "error[" in line), lines[-1] if lines else "")
    return Answer(process.returncode, result, last, time.perf_counter() - began, used.ru_maxrss << 10)


def in_own_process(*words: str) -> dict[str, Any]:
    """The row that this script prints as JSON in its last line when it is run again with ``words``, or a note."""
    command = [sys.executable, *sys.argv, *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ran.returncode != 0:
        return {"note": (ran.stderr.strip().splitlines() or ["no message"])[-1][:160]}
    row: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return row


def settings(*texts: str) -> list[str]:
    """``--set`` before each of ``key=value``."""
    return [word for text in texts for word in ("--set", text)]


def bench(recipe: str, *words: str, env: Mapping[str, str] | None = None, log: Path | None = None) -> Answer:
    """`ftcli bench` of a shipped recipe by its name, or of a recipe's path."""
    path = RECIPES / f"{recipe}.yaml"
    return ftcli(["bench", str(path) if path.exists() else recipe, "--json", *words], env=env, log=log)
