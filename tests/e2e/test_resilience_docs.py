"""docs/troubleshooting.md and docs/preemptible.sh do what they say."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import drill
from tests.e2e.drill import Server
from tests.e2e.resilience import Drills

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+) (run|exit=\d+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path, drill_server: Server) -> dict[str, str]:
    """An environment in which `ftcli` is a quick one."""
    command = tmp_path / "bin" / "ftcli"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {drill.__file__} {drill_server.socket} "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    return {**drill_server.environment, "PATH": path, "FTCLI_CACHE": str(tmp_path / "cache"), "PAUSE": "0"}


@pytest.mark.slow
def test_troubleshooting_runs(tmp_path: Path, shell: dict[str, str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(DOCS / "preemptible.sh", folder)
    blocks = BLOCK.findall((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 10
    for language, expected, text in blocks:
        assert language == "console"
        done = subprocess.run(
            ["bash", "-e", "-c", text], cwd=folder, env=shell, capture_output=True, text=True, timeout=120, check=False
        )
        status = 0 if expected == "run" else int(expected.removeprefix("exit="))
        assert done.returncode == status, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
    assert (folder / "runs/trial.previous-1/report.html").exists()


@dataclass
class Loop:
    """docs/preemptible.sh, running."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> tuple[int, str]:
        """Its status, and what it said."""
        status = self.process.wait(60)
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
    deadline = time.monotonic() + 60
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
    change = {"train": {"max_steps": 24}, "data": {"eval": []}, "checkpoint": {"every_steps": 23}}
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
    with loop(drills.recipe("r", train={"max_steps": 500}), shell, drills.folder) as running:
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
    with loop(drills.recipe("r", train={"max_steps": 500}), shell, drills.folder) as running:
        deadline = time.monotonic() + 60
        while "train 2/500" not in running.log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)
        status, said = running.wait()
    assert status == 75, said
    assert len(drills.checkpoints("r")) == 1
    assert said.count("train 1/500") == 1
    assert drills.status("r")["state"] == "preempted"
