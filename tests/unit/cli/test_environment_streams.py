"""Output that cannot be written, and what launchers leave in the environment, do not end a command."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from ftcli.cli.environment import library_environment, unfailing
from ftcli.reporting import Session, SilentReporter
from tests.e2e.drill import Server

RECIPE = """
version: 1
run: {name: r, output_dir: r}
model: {name_or_path: "bundled:tiny-gemma2", dtype: float32}
lora: {r: 2}
data: {train: [{path: "bundled:smoke-train", max_rows: 8}], max_seq_len: 64}
train: {max_steps: 2, per_device_train_batch_size: 1}
logging: {every_steps: 1}
"""


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    flush = close = lambda self: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # type: ignore[assignment]


def test_a_stream_that_fails_is_written_to_all_the_same() -> None:
    stream = unfailing(Broken())
    print("lost", file=stream, flush=True)
    assert not stream.isatty()
    closed = io.StringIO()
    closed.close()
    print("lost", file=unfailing(closed), flush=True)


class Interrupted(io.StringIO):
    """A signal comes in the middle of a write or flush, and its handler writes into the same stream."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._busy = False
        self.outer: TextIO | None = None

    def _do(self, name: str, *texts: str) -> int:
        if self._busy:
            raise RuntimeError("reentrant call inside")
        if name == self._where and self.outer is not None:
            self._busy, self._where = True, ""
            print("SIGINT: said", file=self.outer, flush=True)
            self._busy = False
        return super().write(*texts) if texts else 0

    def write(self, text: str) -> int:
        return self._do("write", text)

    def flush(self) -> None:
        self._do("flush")


@pytest.mark.parametrize("where", ["write", "flush"])
def test_what_a_signal_says_in_the_middle_of_a_write_is_written_after_it(where: str) -> None:
    stream = Interrupted(where)
    stream.outer = unfailing(stream)
    print("6/400", file=stream.outer, flush=True)
    before, said, _ = stream.getvalue().partition("SIGINT: said\n")
    assert ("6/400" in before, bool(said)) == (True, True)


@pytest.mark.parametrize(
    ("shell", "status"),
    [
        ("ftcli train r.yaml --offline 2> >(head -n 1 >/dev/null) >&-", 0),
        (
            "WORLD_SIZE=2 RANK=0 ACCELERATE_MIXED_PRECISION=fp8 ftcli train r.yaml --offline >/dev/full 2>said",
            3,
        ),
    ],
)
def test_neither_output_that_cannot_be_written_nor_a_launchers_leavings_end_a_run(
    tmp_path: Path, shell: str, status: int, drill_server: Server
) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    words = ["bash", "-c", shell.replace("ftcli", " ".join(drill_server.client), 1)]
    environment = {**drill_server.environment, "FTCLI_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(words, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    state = json.loads((tmp_path / "r" / "status.json").read_text())
    assert (state["state"], state["exit_code"]) == ("completed", 0)
    assert (tmp_path / "r" / "report.html").is_file()
    if status == 3:
        said = (tmp_path / "said").read_text()
        assert "error[FT194]" in said
        assert "one process is used: ACCELERATE_MIXED_PRECISION, RANK, WORLD_SIZE" in said


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, text: str) -> None:
        self.lines.append(text)


def test_what_launchers_leave_has_no_effect_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    left = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true", "OMPI_COMM_WORLD_SIZE": "2"}
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    heard = Heard()
    with library_environment(Session(reporter=heard)):  # type: ignore[arg-type]
        assert not left.keys() & os.environ.keys()
    assert left.items() <= os.environ.items()
    (line,) = heard.lines
    assert "one process is used: ACCELERATE_USE_FSDP, LOCAL_RANK, WORLD_SIZE" in line


@pytest.mark.parametrize(("named", "threads"), [(None, "3"), ("5", "5")])
def test_libraries_start_as_many_threads_as_there_are_cores_for_them(
    named: str | None, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with three of the host's cores has three threads; a number that somebody has set stays."""
    monkeypatch.setattr("ftcli.cli.environment.usable_cores", lambda: 3)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if named is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", named)
    with library_environment(Session(reporter=SilentReporter())):
        assert os.environ["OMP_NUM_THREADS"] == threads
    assert os.environ.get("OMP_NUM_THREADS") == named


def test_torch_takes_the_number_that_it_is_given(tmp_path: Path) -> None:
    """In a new process, which has one core of the machine's: torch itself knows of no quota."""
    program = (
        "from ftcli.cli import environment; from ftcli.reporting import Session, SilentReporter\n"
        "environment.usable_cores = lambda: 1\n"
        "with environment.library_environment(Session(reporter=SilentReporter())):\n"
        "    import torch; print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
