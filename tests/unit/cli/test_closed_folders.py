"""Folders that may not be read: nobody says of them that there is nothing in them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import further
from tests.unit.run.test_summary import write_run

ROOT = Path(__file__).resolve().parents[3]
#: linux/prctl.h and linux/capability.h: what lets root read everything.
_DROP_FROM_BOUNDING_SET, _READS_EVERYTHING = 24, (1, 2)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Two runs, and beside them folders that cannot be listed, or not entered."""
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    modes = {"locked": 0o000, "listed": 0o444}
    for name, mode in modes.items():
        write_run(tmp_path / "runs" / name / "inside")
        (tmp_path / "runs" / name).chmod(mode)
    yield tmp_path
    for name in modes:
        (tmp_path / "runs" / name).chmod(0o755)


def answer(place: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Status and document of a command, by somebody whom permissions bind."""
    libc = ctypes.CDLL(None)

    def be_bound() -> None:
        for capability in _READS_EVERYTHING:
            libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)  # fails for whoever is not root

    done = subprocess.run(
        [sys.executable, "-m", "ftcli", *words, "--json"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=be_bound,
    )
    return done.returncode, json.loads(done.stdout)


def test_runs_lists_what_it_can_and_names_what_it_cannot(place: Path) -> None:
    status, document = answer(place, "runs")
    assert status == 0
    assert [run["path"] for run in document["result"]["runs"]] == ["runs/a", "runs/b"]
    assert document["result"]["unread"] == ["runs/listed", "runs/locked"]
    told = [(found["code"], found["severity"], found["message"]) for found in document["findings"]]
    assert told == [
        ("FT154", "warning", f"runs/{name} cannot be read: Permission denied; runs in it are not listed")
        for name in ("listed", "locked")
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("runs", "runs/listed"),
        ("runs", "runs/locked/inside"),
        ("export", "runs/locked"),
        ("compare", "runs/locked", "runs/a"),
        *further(
            ("runs", "runs/locked"),
            ("chat", "runs/locked/inside", "--prompt", "x"),
            ("eval", str(ROOT / "recipes" / "smoke.yaml"), "--run", "runs/locked"),
        ),
    ],
)
def test_a_folder_that_cannot_be_read_is_called_that(words: tuple[str, ...], place: Path) -> None:
    status, document = answer(place, *words)
    assert status == 2
    said = " ".join(found["message"] for found in document["findings"])
    assert "cannot be read: Permission denied" in said
    for untrue in ("not a directory", "holds no", "no run directory"):
        assert untrue not in said


def test_a_lock_that_may_not_be_opened_is_not_called_free(place: Path) -> None:
    run = write_run(place / "runs" / "another", state="running")
    (run / ".lock").touch(mode=0o000)
    states = {run["path"]: run["state"] for run in answer(place, "runs")[1]["result"]["runs"]}
    assert states["runs/another"] == "running"
