"""Ranks are started, passed signals on, and ended together: tried with small programs in their place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftcli.cli import children as workers
from ftcli.cli.children import Ranks, environment_of
from ftcli.errors import FtcliError
from ftcli.run.heartbeat import Timeouts


def _program(text: str) -> list[str]:
    """A program that knows its rank, and the folder that all share."""
    head = "import os, signal, sys, time; from pathlib import Path\n"
    head += "rank, folder = int(os.environ['RANK']), Path(os.environ['FTCLI_GROUP'])\n"
    return [sys.executable, "-S", "-c", head + text]


def test_the_status_is_that_of_rank_0(tmp_path: Path) -> None:
    assert Ranks(_program("sys.exit([6, 0, 3][rank])"), 3, (), tmp_path).wait().exit_code == 6


def test_word_is_left_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    text = """
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while not (folder / "lost-1").exists():
    time.sleep(0.01)
sys.exit(75 if (folder / "lost-1").read_text() == "was killed by SIGKILL" else 1)
"""
    assert Ranks(_program(text), 2, (), tmp_path).wait().exit_code == 75


def test_a_rank_0_that_is_killed_cannot_say_so_itself(tmp_path: Path) -> None:
    text = "os.kill(os.getpid(), signal.SIGSEGV) if rank == 0 else None"
    with pytest.raises(FtcliError, match="FT710: rank 0 was killed by SIGSEGV") as caught:
        Ranks(_program(text), 2, (), tmp_path).wait()
    assert caught.value.exit_code == 75


def test_ranks_that_do_not_end_after_rank_0_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_NOTHING_TO_DO_SECONDS", 0.3)
    began = time.monotonic()
    assert Ranks(_program("time.sleep(600 * rank); sys.exit(5)"), 2, (), tmp_path).wait().exit_code == 5
    assert time.monotonic() - began < 500


_TOUCHING = """
(folder / f"sign-{rank}").touch()
if rank in STOPPED:
    os.kill(os.getpid(), signal.SIGSTOP)
while not (folder / f"lost-{STOPPED[0]}").exists():
    (folder / f"sign-{rank}").touch()
    time.sleep(0.01)
sys.exit(75)
"""


@pytest.mark.parametrize("stopped", [(0,), (1,), (0, 1)])
def test_ranks_that_are_stopped_are_killed(stopped: tuple[int, ...], tmp_path: Path) -> None:
    ranks = Ranks(_program(f"STOPPED = {stopped}\n{_TOUCHING}"), 2, (), tmp_path, Timeouts(silent=1.0))
    if stopped == (1,):
        assert ranks.wait().exit_code == 75  # rank 0 has its own say
    else:
        with pytest.raises(FtcliError, match="FT710: rank 0 has given no sign of life for 1 s") as caught:
            ranks.wait()
        assert caught.value.exit_code == 75
    for rank in stopped:
        assert (tmp_path / f"lost-{rank}").read_text() == "has given no sign of life for 1 s"


def test_a_rank_that_never_gives_a_sign_is_killed(tmp_path: Path) -> None:
    with pytest.raises(FtcliError, match="FT710: rank 0 has given no sign of life for 0 s"):
        Ranks(_program("time.sleep(600)"), 1, (), tmp_path, Timeouts(silent=0.3)).wait()


def test_a_rank_ends_without_waiting_for_what_hangs_at_the_end() -> None:
    program = """
import atexit, threading, time
from ftcli.cli.environment import leave
atexit.register(print, "done", flush=True)
threading.Thread(target=time.sleep, args=(600,)).start()
leave(75)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (75, "done\n"), done.stderr


_HEARING = """
heard = []
def note(number, _frame):
    heard.append(signal.Signals(number).name)
    (folder / f"heard-{rank}").write_text(" ".join(heard))
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(signal.Signals[name], note)
(folder / f"ready-{rank}").touch()
while len(heard) < 2:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_passed_on_so_that_it_counts_once_and_the_second_as_it_is(
    number: signal.Signals, tmp_path: Path
) -> None:
    def send() -> None:
        for name in ("ready", "heard"):
            while not all((tmp_path / f"{name}-{rank}").exists() for rank in range(2)):
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    assert Ranks(_program(_HEARING), 2, (), tmp_path).wait().exit_code == 0
    assert (tmp_path / "signal").read_text() == signal.Signals(number).name
    first = "SIGINT" if number == signal.SIGINT else "SIGHUP"
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == [f"{first} {number.name}"] * 2


def test_each_rank_has_a_gpu_of_its_own_and_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "6")  # as the launcher has set it for itself
    monkeypatch.setattr("ftcli.cli.children.usable_cores", lambda: 6)
    found = [environment_of(rank, 2, ("3", "GPU-5"), tmp_path) for rank in range(2)]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3", "GPU-5"]
    assert [one["RANK"] for one in found] == ["0", "1"]
    assert [one["OMP_NUM_THREADS"] for one in found] == ["3", "3"]
    assert environment_of(0, 12, (), tmp_path)["OMP_NUM_THREADS"] == "1"
    assert environment_of(0, 2, (), tmp_path, "5")["OMP_NUM_THREADS"] == "5"  # which the user has set
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(0, 2, (), tmp_path)
