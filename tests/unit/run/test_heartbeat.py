"""What counts as silence of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore, Store

from ftcli.ranks import Place
from ftcli.run import heartbeat
from ftcli.run.heartbeat import Heartbeat, RankLost, Silence, Timeouts


def test_time_in_which_the_watching_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    silence = Silence([0, 1])
    for _ in range(8):
        now += 0.25
        silence.count()
    silence.heard(1)
    now += 3600
    silence.count()
    assert silence.seconds() == {0: 3.0, 1: 1.0}


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of rank 0, which says nothing more."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def listening(store: Store, **place: object) -> Heartbeat:
    return Heartbeat(store, Place(1, 2, **place), Timeouts(silent=0.5, leaving=600.0), lambda: None)  # type: ignore[arg-type]


def test_a_silent_process_of_this_host_is_killed_and_named(
    store: Store, peer: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    store.set("sign/0", f"1 {peer.pid} {heartbeat._space()} step begins")
    signs = listening(store, folder=tmp_path)
    signs.start()
    assert peer.wait(20) == -signal.SIGKILL
    lost = signs.lost()
    signs.stop(orderly=False)
    assert isinstance(lost, RankLost)
    assert (lost.ranks, lost.exit_code) == ([0], 75)
    assert (tmp_path / "lost-0").read_text() == lost.how == "has given no sign of life for 0 s"


def test_a_process_that_begins_to_speak_later_is_known_at_once(
    store: Store, peer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was stopped in its first second was left over where the launcher had been killed."""
    monkeypatch.setattr(heartbeat, "_SECONDS", 1e6)
    signs = Heartbeat(store, Place(1, 2), Timeouts(silent=1e9), lambda: None)
    signs.start()
    until(lambda: store.check(["sign/1"]))
    store.set("sign/0", f"1 {peer.pid} {heartbeat._space()} step begins")
    until(lambda: 0 in signs._processes)
    signs.stop(orderly=True)


def test_a_silent_process_of_another_host_is_let_be(store: Store, peer: subprocess.Popen[bytes]) -> None:
    store.set("sign/0", f"1 {peer.pid} another-boot/pid:[1] step begins")
    signs = listening(store)
    signs.start()
    until(signs.lost)
    time.sleep(0.3)
    signs.stop(orderly=False)
    assert peer.poll() is None


def test_a_rank_that_has_left_as_it_should_is_not_missed(store: Store) -> None:
    other = Heartbeat(store, Place(0, 2), Timeouts(silent=0.5), lambda: None)
    signs = listening(store)
    signs.start()
    other.start()
    until(lambda: store.check(["sign/0"]))
    other.stop(orderly=True)
    time.sleep(1.5)
    assert signs.lost() is None
    signs.stop(orderly=True)


class _Gone(HashStore):
    """A store whose process is gone."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("hosted", [False, True], ids=["rank 0", "torchrun"])
def test_where_nobody_can_be_heard_it_is_the_one_that_holds_what_all_say(hosted: bool) -> None:
    signs = listening(_Gone(), hosted=hosted)
    signs.start()
    until(signs.lost)
    lost = signs.lost()
    signs.stop(orderly=False)
    assert isinstance(lost, RankLost)
    who = "torchrun" if hosted else "rank 0"
    assert lost.findings[0].message.startswith(f"{who} has given no sign of life for 0 s")
    assert signs.unreachable


def test_a_rank_with_nothing_to_save_ends_by_itself_when_its_main_thread_is_held_up(store: Store) -> None:
    child = os.fork()
    if child == 0:
        signs = Heartbeat(store, Place(1, 2), Timeouts(silent=0.3, leaving=0.2), lambda: None)
        signs.start()
        time.sleep(60)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
