"""docs/preemptible.sh does what it says; test_docs.py runs the page that shows it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.resilience import NO_EVAL, Drills

DOCS = Path(__file__).resolve().parents[2] / "docs"


@dataclass
class Loop:
    """docs/preemptible.sh, running."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> tuple[int, str]:
        """Its status, and what it said."""
        status = self.process.wait(600)
        return status, self.log.read_text(encoding="utf-8")


@contextlib.contextmanager
def loop(recipe: str, shell: dict[str, str], folder: Path) -> Iterator[Loop]:
    """Runs the script until the block ends."""
    log = folder / "log"
    with log.open("wb") as file:
        command = ["sh", str(DOCS / "preemptible.sh"), recipe, "--offline"]
        process = subprocess.Popen(command, cwd=folder, env=shell, stdout=file, stderr=file)
    try:
        yield Loop(process, log)
    finally:
        process.kill()
        process.wait()


def signal_training(running: Loop, run: Path, number: int, after: int) -> int:
    """Sends a signal to the process that trains, once it has made a step beyond ``after``; the step."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and running.process.poll() is None:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if (run / "metrics.jsonl").exists() else []
        step = json.loads(lines[-1])["step"] if lines else 0
        if step > after:
            os.kill(json.loads((run / "status.json").read_text())["pid"], number)
            return int(step)
        time.sleep(0.01)
    raise AssertionError(f"no step was made:\n{running.log.read_text()}")


def test_the_loop_starts_again_after_each_preemption_and_ends_with_the_run(
    drills: Drills, shell: dict[str, str]
) -> None:
    change = {"train": {"max_steps": 24}, "checkpoint": {"every_steps": 23}, **NO_EVAL}
    whole = drills.whole(**change)
    with loop(drills.recipe("r", **change), shell, drills.folder) as running:
        step = 0
        for _ in range(2):
            step = signal_training(running, drills.folder / "r", signal.SIGTERM, step) + 3
        status, said = running.wait()
    assert status == 0, said
    assert said.count("error[FT701]: stopped by SIGTERM") == 2
    drills.require_same_run("r", whole)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, 137), (signal.SIGINT, 130)])
def test_the_loop_gives_up_on_any_other_status(drills: Drills, shell: dict[str, str], number: int, status: int) -> None:
    with loop(drills.recipe("r", train={"max_steps": 500}, **NO_EVAL), shell, drills.folder) as running:
        signal_training(running, drills.folder / "r", number, 1)
        ended, said = running.wait()
    assert ended == status, said
    assert said.count("train 1/500") == 1


def test_the_loop_gives_up_on_a_bad_recipe(drills: Drills, shell: dict[str, str]) -> None:
    with loop(drills.recipe("r", lora={"rank": 3}), shell, drills.folder) as running:
        status, said = running.wait()
    assert status == 2, said
    assert said.count("error[FT2") == 1


def test_a_signal_to_the_loop_reaches_training_and_ends_the_loop_with_75(drills: Drills, shell: dict[str, str]) -> None:
    with loop(drills.recipe("r", train={"max_steps": 500}, **NO_EVAL), shell, drills.folder) as running:
        deadline = time.monotonic() + 600
        while "train 2/500" not in running.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        status, said = running.wait()
    assert status == 75, said
    assert len(drills.checkpoints("r")) == 1
    assert said.count("train 1/500") == 1
    assert drills.status("r")["state"] == "preempted"
