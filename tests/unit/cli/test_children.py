"""Runs of a sweep as processes: which GPU each gets, how they are stopped, and why they failed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.cli import children
from ftcli.errors import FtcliError


def none() -> int:
    raise AssertionError("the environment lists them")


@pytest.mark.parametrize(
    ("wanted", "listed", "found"),
    [
        (None, "0,1", (None,)),
        ("auto", "4,5,6", ("4", "5", "6")),
        ("2", "4,5,6", ("4", "5")),
        ("1", "GPU-12ab,MIG-3", ("GPU-12ab",)),
        ("auto", "", (None,)),
        ("auto", "2,-1,3", ("2",)),
    ],
)
def test_gpus_are_those_that_are_visible(wanted: str | None, listed: str, found: tuple[str | None, ...]) -> None:
    assert children.devices(wanted, {"CUDA_VISIBLE_DEVICES": listed}, none) == found


def test_gpus_are_counted_where_the_environment_does_not_say() -> None:
    assert children.devices("auto", {}, lambda: 3) == ("0", "1", "2")
    assert children.devices("2", {}, lambda: 3) == ("0", "1")
    assert children.devices("auto", {}, lambda: 0) == (None,)


@pytest.mark.parametrize(("wanted", "code", "status"), [("3", "FT516", 3), ("0", "FT150", 2), ("x", "FT150", 2)])
def test_gpus_that_are_not_there(wanted: str, code: str, status: int) -> None:
    with pytest.raises(FtcliError) as caught:
        children.devices(wanted, {"CUDA_VISIBLE_DEVICES": "0,1"}, none)
    assert caught.value.exit_code == status
    assert [finding.code for finding in caught.value.findings] == [code]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the package, so that a process starts in a moment."""
    package = tmp_path / "ftcli"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package / "__main__.py"


def wait(process: children.RunProcess) -> tuple[int, str | None]:
    deadline = time.monotonic() + 600
    while (end := process.ended()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return end


STARTING = """
import sys, time
from ftcli.cli import children
process = children.RunProcess([sys.argv[1]], None)
print(process._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_run_is_told_when_its_sweep_is_killed(program: Path, tmp_path: Path) -> None:
    program.write_text(WAITING.replace("len(heard) < 2", "len(heard) < 1"))
    code = f"import os; os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n{STARTING}"
    root = str(Path(children.__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "heard")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root}:{root}/kernels"},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        until(lambda: (tmp_path / "heard").exists())
        parent.kill()
        parent.wait()
        until(lambda: (tmp_path / "heard").read_text() == "SIGHUP")
    finally:
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_has_its_gpu_and_its_words(program: Path, tmp_path: Path) -> None:
    program.write_text(
        "import os, sys\nopen(os.environ['HOME_OF_TEST'] + '/seen', 'w').write("
        "os.environ['CUDA_VISIBLE_DEVICES'] + ' ' + ' '.join(sys.argv[1:]) + ' ' + str(os.getsid(0) == os.getpid()))\n"
    )
    os.environ["HOME_OF_TEST"] = str(tmp_path)
    try:
        assert wait(children.RunProcess(["train", "r.yaml"], "GPU-b")) == (0, None)
    finally:
        del os.environ["HOME_OF_TEST"]
    assert (tmp_path / "seen").read_text() == "GPU-b train r.yaml True"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("import sys\nprint('{\"findings\": [{\"code\": \"FT1\", \"severity\": \"note\", \"message\": \"n\"}, "
         "{\"code\": \"FT702\", \"severity\": \"error\", \"message\": \"diverged\"}]}')\nsys.exit(6)\n",
         (6, "FT702: diverged")),
        ("import sys\nprint('no JSON')\nsys.exit(3)\n", (3, None)),
        ("import os\nos.kill(os.getpid(), 9)\n", (-9, "killed by signal 9")),
    ],
)  # fmt: skip
def test_why_a_process_failed(program: Path, text: str, end: tuple[int, str | None]) -> None:
    program.write_text(text)
    process = children.RunProcess([], None)
    assert wait(process) == end
    process.signal("SIGINT")  # of a process that has ended: nothing


WAITING = """
import pathlib, signal, sys, time
heard = []
def note(number, frame):
    heard.append(signal.Signals(number).name)
    pathlib.Path(sys.argv[1]).write_text(" ".join(heard))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as `ftcli train` does
        signal.signal(number, note)
pathlib.Path(sys.argv[1]).write_text("")
while len(heard) < 2:
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("name", "heard"), [("SIGINT", "SIGINT SIGINT"), ("SIGTERM", "SIGHUP SIGTERM"), ("SIGHUP", "SIGHUP SIGHUP")]
)
def test_the_first_signal_cannot_count_twice(name: str, heard: str, program: Path, tmp_path: Path) -> None:
    """SIGTERM may have reached the process already, from a scheduler; SIGHUP after it changes nothing. Under nohup
    (SIGHUP is ignored) it is heard all the same."""
    program.write_text(WAITING)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = children.RunProcess([str(tmp_path / "heard")], None)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        for said in (heard.split()[:1], heard.split()):
            deadline = time.monotonic() + 600
            while not (tmp_path / "heard").exists() or (tmp_path / "heard").read_text().split() != said[:-1]:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.signal(name)  # type: ignore[arg-type]
        wait(process)
    finally:
        process._process.kill()
        process._process.wait()
    assert (tmp_path / "heard").read_text() == heard
