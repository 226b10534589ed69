"""Real `ftcli` processes that start in a moment, so that many things can go wrong with them in little time.

Importing torch, transformers and TRL takes seconds. A server (drill_server.py) imports them once, and trains one step;
each command line then runs in a fork of it, with its own streams, folder, environment, limits and signals: a process
like any other, which can be killed, starved of memory or disk, or stopped at a chosen place. drill_client.py runs one
for shell scripts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.drill_client import ask, number

#: Of one wait, which only a hang takes.
_SECONDS = 600.0


@dataclass
class Drill:
    """One running command."""

    pid: int
    connection: socket.socket
    output: Path
    folder: Path
    status: int | None = field(default=None)

    @property
    def said(self) -> str:
        """Everything it has printed, stdout and stderr."""
        return self.output.read_text(encoding="utf-8")

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        os.kill(self.pid, number)

    def until_reached(self) -> None:
        """Waits for its pause."""
        self._until((self.folder / "reached").exists)

    def until(self, path: Path) -> None:
        """Waits for a file or folder to appear."""
        self._until(path.exists)

    def until_step(self, run: Path, step: int) -> None:
        """Waits for the checkpoint of a step, or of a later one: a quick run has removed it when it is looked for."""
        names = [f"step-{one:08d}" for one in range(step, step + 100)]
        self._until(lambda: any((run / "checkpoints" / name).exists() for name in names))

    def until_said(self, text: str) -> None:
        """Waits for words of it."""
        self._until(lambda: text in self.said)

    def _until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not happened():
            assert time.monotonic() < deadline, self.said
            self.connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                assert self.connection.recv(1, socket.MSG_PEEK) == b"", f"it has ended:\n{self.said}"
            time.sleep(0.005)

    def release(self) -> None:
        """Ends its pause."""
        (self.folder / "released").touch()

    def wait(self, seconds: float = _SECONDS) -> int:
        """Its exit status; -9 for one that was killed by signal 9."""
        if self.status is None:
            self.connection.settimeout(seconds)
            try:
                self.status = number(self.connection)
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"it has not ended in {seconds} s:\n{self.said}") from None
            self.connection.close()
        return self.status

    def end(self) -> None:
        """Kills it if it still runs."""
        if self.status is None and self.connection.fileno() >= 0:
            self.connection.setblocking(False)
            try:
                self.connection.recv(1, socket.MSG_PEEK)
            except BlockingIOError:  # it has not said how it ended: it runs
                os.kill(self.pid, signal.SIGKILL)
            self.connection.close()


class Server:
    """Starts commands below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "socket")
        #: What runs the words after it as a command; drill_client.py.
        self.client = (sys.executable, "-S", "-E", str(Path(__file__).with_name("drill_client.py")), self.socket)
        self._folder = folder
        self._started: list[Drill] = []
        #: Runs that were never disturbed, by what their recipes say; several tests compare with the same one.
        self.references: dict[str, Path] = {}
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "0",
            "HF_HUB_OFFLINE": "1",
            # For each connection of its store torch asks for the name of 127.0.0.1: a DNS server that does not answer
            # now and then would hold both ranks up for five seconds each time.
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when libraries are imported
        quiet["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        #: Where rows stay tokenized for all commands that are given it, in place of a cache of their own.
        self.cache = str(folder / "cache")
        quiet["FTCLI_CACHE"] = self.cache
        command = [sys.executable, "-W", "ignore", "-m", "tests.e2e.drill_server", self.socket]
        self._process = subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment | quiet,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(
        self,
        *words: str,
        cwd: Path,
        preparations: Iterator[Any] | tuple[Any, ...] = (),
        script: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Drill:
        """A command, or another program, in its own process. What is released among ``preparations`` is
        written without its folder.
        """
        folder = self._folder / str(len(self._started))
        folder.mkdir()
        prepared = [
            [*p, str(folder)] if p[0] in ("pause", "hurried", "forked_ranks") else list(p) for p in preparations
        ]
        request = {
            "words": list(words),
            "script": None if script is None else str(script),
            "folder": str(cwd),
            "environment": {**self.environment, "FTCLI_CACHE": str(cwd / "cache"), **(environment or {})},
            "preparations": json.dumps(prepared),
            "closed": [],
            "limits": {},
        }
        output = folder / "output"
        with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            connection, pid = ask(self.socket, request, [nothing.fileno(), file.fileno(), file.fileno()])
        self._started.append(Drill(pid, connection, output, folder))
        return self._started[-1]

    def imported(self) -> dict[str, Any]:
        """What importing all of ftcli changed in it: see untouched.py."""
        found: dict[str, Any] = json.loads(Path(self.socket).with_name("imported.json").read_text(encoding="utf-8"))
        return found

    def close(self) -> None:
        """Ends the server and whatever still runs."""
        for drill in self._started:
            drill.end()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(_SECONDS)
