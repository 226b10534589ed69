"""The memory estimate against what a GPU allocates: every shipped recipe, and a grid of whole models.

    python kernels/bench/memory.py --json memory.json --table memory.md --seconds 170
    python kernels/bench/memory.py --list --as h200          # predictions alone; no GPU, no torch
    python kernels/bench/memory.py --only smoke               # cases by name; also on a CPU

Recipes run through `ftcli train` and `ftcli grpo` with random weights on rows of full length: two steps of two
micro-batches and an evaluation (GRPO: one step). The grid runs through `ftcli bench`. Several processes share the GPU;
each counts its own allocator's bytes, so they do not disturb one another, and a case is started when its predicted
total fits beside the others. Ends with 1 when a case is out of the margin, fails, or found no time.

What is compared is stated at ``memory_schedule.Row``. On a CPU, whose memory is the process', each case has a process
of its own and the estimate with the interpreter and its libraries is compared with the peak of the resident set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memory_cases import Case, grid_cases, recipe_cases
from memory_schedule import GIB, Need, Row, markdown, next_to_start

from ftcli.errors import FtcliError
from ftcli.facts.device import DeviceFacts, named_device

#: Seconds after ``--seconds`` in which what is running may end.
GRACE = 60.0
#: Share of a machine's memory that cases on its CPU may be predicted to take.
CPU_SHARE = 0.8


@dataclass(slots=True)
class Worker:
    """A process, the case that it is running, and its log."""

    process: SpawnProcess
    connection: Connection
    log: Path
    case: Case | None = None
    ready: bool = False


@dataclass(slots=True)
class Measurement:
    """Cases on their way from pending to rows."""

    cases: list[Case]
    workers: int
    budget: Need
    seconds: float
    folder: Path
    idle_used: int = 0
    device: DeviceFacts | None = None
    context: int | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    pending: list[Case] = field(default_factory=list)
    needs: dict[str, Need] = field(default_factory=dict)
    crew: list[Worker] = field(default_factory=list)
    began: float = 0.0

    def run(self) -> list[Row]:
        """Every case's row, in the cases' order."""
        self.began = time.monotonic()
        self.pending = list(self.cases)
        for _ in range(min(self.workers, len(self.cases))):
            self._hire()
        while any(worker.case or not worker.ready for worker in self.crew):
            if self._elapsed() > self.seconds + GRACE:
                self._abandon()
                break
            for connection in wait([worker.connection for worker in self.crew], timeout=1.0):
                self._hear(next(worker for worker in self.crew if worker.connection is connection))
        self._measure_context()
        for worker in self.crew:
            with contextlib.suppress(ConnectionError):
                worker.connection.send(None)
        for worker in self.crew:
            worker.process.join(10)
            worker.process.terminate()
        return [self._row(case) for case in self.cases]

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        log = self.folder / f"worker-{len(list(self.folder.iterdir()))}.log"
        log.touch()
        process = context.Process(target=work, args=(theirs, log))
        process.start()
        theirs.close()
        self.crew.append(Worker(process, ours, log))

    def _hear(self, worker: Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            self._lose(worker)
            self._assign()
            return
        if not worker.ready:
            worker.ready = True
            if self.device is None:
                self._predict(message)
        elif worker.case is not None:
            self.results[worker.case.name] = message
            self._say(worker.case.name, f"{message['seconds']:.0f} s")
            worker.case = None
            if not message["stays"]:
                self._lose(worker)
        self._assign()

    def _predict(self, device: DeviceFacts) -> None:
        """Fills in what each case needs, once the device is known; a case that cannot be predicted is a row."""
        self.device = device
        if device.kind == "cpu":
            self.budget = Need(int(CPU_SHARE * (device.memory_bytes or self.budget.device_bytes)))
        for case in self.cases:
            try:
                estimate = case.estimate(device)
            except FtcliError as error:
                self.rows[case.name] = Row(case.name, error=str(error))
                self.pending.remove(case)
                continue
            whole = device.kind == "cpu"
            self.rows[case.name] = Row(
                case.name,
                phase=estimate.peak,
                predicted_bytes=estimate.total_bytes if whole else estimate.allocated_bytes,
                predicted_total_bytes=estimate.total_bytes,
            )
            self.needs[case.name] = Need(estimate.total_bytes, estimate.pinned_host_bytes)

    def _assign(self) -> None:
        """Gives cases to idle workers, as many as there is room and time for."""
        if self.device is None:
            return
        for worker in [each for each in self.crew if each.ready and each.case is None]:
            if self._elapsed() > self.seconds:
                return
            running = [self.needs[each.case.name] for each in self.crew if each.case is not None]
            chosen = next_to_start([self.needs[case.name] for case in self.pending], running, self.budget)
            if chosen is None:
                return
            worker.case = self.pending.pop(chosen)
            worker.connection.send(worker.case)
            self._say(worker.case.name, "started")

    def _lose(self, worker: Worker) -> None:
        """A process that has ended, with its case or after it; another takes its place while there is work."""
        worker.process.join(10)
        self.crew.remove(worker)
        if worker.case is not None:
            self._fail(worker.case, worker)
        elif not worker.ready:
            self._say("worker", _last_line(worker.log))
            if not self.crew:
                for case in self.pending:
                    self._fail(case, worker)
                self.pending.clear()
            return
        if self.pending and self._elapsed() < self.seconds:
            self._hire()

    def _fail(self, case: Case, worker: Worker) -> None:
        error = _last_line(worker.log) or f"the process ended with {worker.process.exitcode}"
        self.rows[case.name] = replace(self.rows.get(case.name, Row(case.name)), error=error)
        self._say(case.name, error)

    def _abandon(self) -> None:
        for worker in self.crew:
            if worker.case is not None:
                self.rows[worker.case.name] = replace(self.rows[worker.case.name], error="ran out of time")
                worker.process.terminate()
        self.crew = [worker for worker in self.crew if worker.case is None and worker.ready]

    def _measure_context(self) -> None:
        """What a process takes of the GPU beside its allocator's memory: the mean of those that are still there."""
        if self.device is None or self.device.kind != "cuda" or not self.crew:
            return
        found = []
        for worker in list(self.crew):
            try:
                worker.connection.send("footprint")
                found.append(worker.connection.recv())
            except (EOFError, ConnectionError):
                self.crew.remove(worker)
        if not found:
            return
        self.context = (found[-1]["used"] - self.idle_used - sum(each["reserved"] for each in found)) // len(found)

    def _row(self, case: Case) -> Row:
        row = self.rows.get(case.name, Row(case.name))
        result = self.results.get(case.name)
        if result is None:
            return row if row.error else replace(row, error="not started: no time left")
        total = max(result["reserved"].values())
        return replace(
            row,
            measured_bytes=max(result["allocated"].values()),
            measured_total_bytes=total + (self.context or 0),
            spans=result["allocated"],
            seconds=result["seconds"],
        )

    def _say(self, name: str, text: str) -> None:
        print(f"{self._elapsed():6.1f} s  {name}: {text}", file=sys.stderr, flush=True)


def work(connection: Connection, log: Path) -> None:
    """What a worker's process runs; torch is imported there and not here."""
    from memory_worker import main as serve

    serve(connection, log)


def used_when_idle() -> int:
    """Bytes in use on the GPU before any of our processes; 0 where the driver's tool is not there to ask."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"],  # noqa: S607
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return int(asked.stdout.strip()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def chosen_cases(only: Sequence[str]) -> list[Case]:
    """All cases, or those whose names contain one of ``only``."""
    cases = [*recipe_cases(), *grid_cases()]
    return [case for case in cases if not only or any(word in case.name for word in only)]


def print_predictions(cases: Sequence[Case], device: DeviceFacts) -> None:
    """GiB without and with CUDA's own, pinned GiB, the phase, and the parts of it."""
    for case in cases:
        found = case.estimate(device)
        sizes = (
            f"{found.allocated_bytes / GIB:7.2f} {found.total_bytes / GIB:7.2f} {found.pinned_host_bytes / GIB:6.2f}"
        )
        parts = ", ".join(f"{name} {found.parts[name] / GIB:.2f}" for name in found.phases[found.peak])
        print(f"{sizes}  {case.name}: {found.peak} ({parts})")


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def main() -> int:
    """Measures, writes, and tells by its exit status whether all went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--table", type=Path, help="write the table there as well as to stdout")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose name contains a word")
    parser.add_argument("--seconds", type=float, default=170.0, help="start no case after this")
    parser.add_argument("--workers", type=int, default=max(1, min(6, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--gpu-gib", type=float, default=130.0, help="predicted totals that may run at once")
    parser.add_argument("--pinned-gib", type=float, default=90.0, help="pinned host memory that may be used at once")
    parser.add_argument("--list", action="store_true", help="print predictions and measure nothing")
    parser.add_argument("--as", dest="device", default="h200", help="the device that --list answers for")
    options = parser.parse_args()
    cases = chosen_cases(options.only)
    if options.list:
        print_predictions(cases, named_device(options.device))
        return 0
    budget = Need(int(options.gpu_gib * GIB), int(options.pinned_gib * GIB))
    idle = used_when_idle()
    with tempfile.TemporaryDirectory(prefix="ftcli-memory-") as folder:
        measurement = Measurement(cases, options.workers, budget, options.seconds, Path(folder), idle)
        rows = measurement.run()
    text = markdown(rows)
    print(text)
    if options.table is not None:
        options.table.write_text(f"{text}\n", encoding="utf-8")
    if options.json is not None:
        device = None if measurement.device is None else measurement.device.name
        content = {
            "device": device,
            "context_bytes": measurement.context,
            "idle_bytes": idle,
            "cases": [r.as_dict() for r in rows],
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
