"""One process at a time works in a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ftcli.config.recipe import Recipe
from ftcli.errors import FtcliError
from ftcli.run.directory import LOCK_NAME, is_locked
from ftcli.run.resume import open_run
from ftcli.run.samples import SampleFolder

HOLDER = """
import os, sys, time
from pathlib import Path
from ftcli.run.resume import open_run
opened = open_run(Path(sys.argv[1]), "auto", Path(sys.argv[2]).read_text())
if sys.argv[3] == "fork" and os.fork() == 0:
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)
    os._exit(0)
os.write(1, b"ready\\n")
time.sleep(60)
"""


def recipe() -> str:
    raw = {"version": 1, "model": {"name_or_path": "bundled:tiny-gemma2"}}
    return yaml.safe_dump(Recipe.model_validate(raw).model_dump(mode="json"), sort_keys=False)


def start_holder(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    (tmp_path / "recipe-of-holder.yaml").write_text(recipe())
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / "a"), str(tmp_path / "recipe-of-holder.yaml"), mode]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_with_pid_and_start_and_a_kill_frees_the_lock(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, "plain")
    assert holder.stdout is not None
    with holder, holder.stdout:
        assert holder.stdout.readline() == "ready\n"
        for resume in ("auto", "never"):
            with pytest.raises(FtcliError) as caught:
                open_run(tmp_path / "a", resume, recipe())
            assert [finding.code for finding in caught.value.findings] == ["FT720"]
            assert f"process {holder.pid} on " in caught.value.findings[0].message
            assert time.strftime("%Y-%m", time.gmtime()) in caught.value.findings[0].message
        holder.kill()
        holder.wait()
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        assert opened.resume_from is None


def test_a_killed_runs_orphans_do_not_keep_its_lock(tmp_path: Path) -> None:
    holder = start_holder(tmp_path, "fork")
    assert holder.stdout is not None
    with holder, holder.stdout:
        lines = {holder.stdout.readline().strip() for _ in range(2)}
        orphan = int(next(line for line in lines if line.isdigit()))
        try:
            assert is_locked(tmp_path / "a")
            holder.kill()
            holder.wait()
            os.kill(orphan, 0)  # it lives on
            with open_run(tmp_path / "a", "auto", recipe()):
                pass
        finally:
            os.kill(orphan, 9)


def test_a_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with open_run(tmp_path / "a", "auto", recipe()) as opened:
        assert [w.code for w in opened.warnings] == ["FT729"]


def test_a_pipe_in_place_of_the_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_NAME)
    assert not is_locked(tmp_path)


def test_a_pipe_in_the_place_of_the_lock_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / LOCK_NAME)
    for start in (lambda: open_run(tmp_path, "auto", recipe()), SampleFolder(tmp_path).__enter__):
        with pytest.raises(FtcliError, match=r"cannot write .*/\.lock: it is a pipe, not a regular file"):
            start()
