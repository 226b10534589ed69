"""Temporary folders: none is left of whoever ends, however it does, and none is taken from whoever lives."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ftcli.paths import _LOCK, scratch

HOLDS = """
import sys, time
from ftcli.paths import scratch
with scratch("drill") as made:
    print(made.path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def aged(folder: Path) -> Path:
    """The folder as if it were an hour old."""
    now = time.time()
    os.utime(folder / _LOCK, (now - 3600, now - 3600))
    return folder


def left_by_the_next(place: Path) -> set[str]:
    """Names of folders that are there once the next one is made."""
    with scratch("drill") as made:
        assert made.path.is_dir()
        return {path.name for path in place.iterdir()} - {made.path.name}


def test_a_folder_goes_with_its_block_and_that_of_a_killed_process_with_the_next(place: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = aged(Path(process.stdout.readline().strip()))
        (folder / "much").write_text("x")
        assert left_by_the_next(place) == {folder.name}  # it lives
        process.send_signal(signal.SIGKILL)
    assert folder.is_dir()
    assert left_by_the_next(place) == set()
    assert list(place.iterdir()) == []


def test_ranks_hold_the_folder_of_a_launcher_that_is_gone(place: Path) -> None:
    code = f"""
from ftcli.cli.children import Ranks
from ftcli.paths import scratch
with scratch("drill") as made:
    rank = [{sys.executable!r}, "-S", "-c", "import time; time.sleep(600)"]
    ranks = Ranks(rank, 1, (), made.path, held=made.descriptor)
    print(made.path, ranks._processes[0].pid, flush=True)
    ranks.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        name, pid = launcher.stdout.readline().split()
        folder, rank = aged(Path(name)), os.pidfd_open(int(pid))
        signal.pidfd_send_signal(rank, signal.SIGSTOP)  # it would hear that its launcher is gone, and end
        while not Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].startswith(" T"):
            time.sleep(0.01)
        launcher.send_signal(signal.SIGKILL)
    assert left_by_the_next(place) == {folder.name}
    signal.pidfd_send_signal(rank, signal.SIGKILL)
    assert select.select([rank], [], [], 60)[0], "it has not ended"
    os.close(rank)
    assert left_by_the_next(place) == set()


def test_what_is_young_or_not_ours_stays(place: Path) -> None:
    for name in ("ftcli-drill-young", "ftcli-other-1", "ftcli-drill-old-version"):
        (place / name).mkdir()
    for name in ("ftcli-drill-young", "ftcli-other-1"):
        (place / name / _LOCK).touch()
    aged(place / "ftcli-other-1")
    (place / "ftcli-drill-link").symlink_to(place / "ftcli-other-1")
    (place / "ftcli-drill-file").touch()
    names = {path.name for path in place.iterdir()}
    assert left_by_the_next(place) == names
