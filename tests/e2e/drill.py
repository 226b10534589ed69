"""Real `ftcli` processes that start in a moment, so that many things can go wrong with them in little time.

Importing torch, transformers and TRL takes seconds. A server imports them once; each command line then runs in a
fork of it, with its own streams, folder, environment, limits and signals: a process like any other, which can be
killed, starved of memory or disk, or stopped at a chosen place. ``python drill.py SOCKET`` is the server,
``python drill.py SOCKET WORD...`` runs one command (and passes signals on), for shell scripts.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WARM = (
    "ftcli.cli.app",
    "ftcli.model.attention",
    "ftcli.model.selfcheck",
    "ftcli.pipeline.build",
    "ftcli.pipeline.checking",
    "ftcli.pipeline.evaluation",
    "ftcli.pipeline.exporting",
    "ftcli.pipeline.training",
    "ftcli.trainers.callbacks",
    "ftcli.trainers.sft",
    "ftcli.evaluate.suite",
    "ftcli.preflight.stages",
    "peft.peft_model",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.trainer",
)
_SECONDS = 60.0
_M_MMAP_THRESHOLD = -3  # malloc.h


# -- what a command's process does before it runs ------------------------------------------------------------------


def _wrap(target: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts a function around ``module:function`` or ``module:Class.method``, in this process only."""
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, around(getattr(owner, name)))


def pause(target: str, call: int, folder: str) -> None:
    """In the ``call``-th call of ``target``, makes ``folder/reached`` and waits for ``folder/released``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def waiting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                Path(folder, "reached").touch()
                deadline = time.monotonic() + _SECONDS
                while not Path(folder, "released").exists() and time.monotonic() < deadline:
                    time.sleep(0.005)
            return function(*args, **kwargs)

        return waiting

    _wrap(target, around)


def starve(target: str, call: int, spare: int) -> None:
    """From the ``call``-th call of ``target`` on, this process may take ``spare`` bytes more than it has.

    Blocks of 64 KiB and more are taken from the system one by one and given back at once, so that what is free in the
    process itself is of no help.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def starved(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                libc.malloc_trim(0)
                lines = Path("/proc/self/status").read_text().splitlines()
                held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
                resource.setrlimit(resource.RLIMIT_DATA, (held + spare, resource.RLIM_INFINITY))
            return function(*args, **kwargs)

        return starved

    _wrap(target, around)


def fail(target: str, message: str) -> None:
    """``target`` raises RuntimeError."""

    def around(_function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*_args: Any, **_kwargs: Any) -> Any:
            raise RuntimeError(message)

        return failing

    _wrap(target, around)


def small_files(limit: int) -> None:
    """No file of this process may grow beyond ``limit`` bytes: the system refuses, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def workers(count: int) -> None:
    """Training data is collated in ``count`` worker processes."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: {**function(*args, **kwargs), "dataloader_num_workers": count}

    _wrap("ftcli.trainers.sft:training_arguments", around)


_PREPARATIONS = {f.__name__: f for f in (pause, starve, fail, small_files, workers)}


# -- the server ----------------------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Answers until stdin is closed."""
    for name in _WARM:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    listener.settimeout(0.2)
    os.set_blocking(0, False)
    os.write(1, b"ready\n")
    while not _closed(0):
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _supervise(connection)
            connection.close()


def _closed(descriptor: int) -> bool:
    try:
        return os.read(descriptor, 1) == b""
    except BlockingIOError:
        return False


def _supervise(connection: socket.socket) -> None:
    """Forks the command, tells its pid, and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.settimeout(None)
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    if child == 0:
        connection.close()
        _become(json.loads(message), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with contextlib.suppress(OSError):
        connection.sendall(f"{child}\n".encode())
    threading.Thread(target=_kill_with_its_client, args=(connection, child), daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _kill_with_its_client(connection: socket.socket, child: int) -> None:
    """A client that was killed is its command being killed."""
    with contextlib.suppress(OSError):
        if connection.recv(1) == b"":
            os.kill(child, signal.SIGKILL)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    from ftcli.cli.app import main

    status = 99
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        for number, limits in request["limits"].items():
            resource.setrlimit(int(number), tuple(limits))
        for name, *arguments in request["preparations"]:
            _PREPARATIONS[name](*arguments)
        status = main(request["words"]) if request["script"] is None else _script(request["script"], request["words"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _script(path: str, words: list[str]) -> int:
    """Runs a Python file as a program; its exit status."""
    sys.argv = [path, *words]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


# -- its clients ---------------------------------------------------------------------------------------------------


def _ask(path: str, request: dict[str, Any], descriptors: list[int]) -> tuple[socket.socket, int]:
    """Starts a command; the socket, which will say how it ends, and the command's pid."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return connection, _number(connection)


def _number(connection: socket.socket) -> int:
    text = b""
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise ConnectionError("the server has ended")
        text += part
    return int(text)


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
                self.status = _number(self.connection)
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
        self._folder = folder
        self._started: list[Drill] = []
        #: Runs that were never disturbed, by what their recipes say; several tests compare with the same one.
        self.references: dict[str, Path] = {}
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "0",
            "HF_HUB_OFFLINE": "1",
        }
        quiet = {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # read when libraries are imported
        command = [sys.executable, "-W", "ignore", __file__, self.socket]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment | quiet, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def start(
        self,
        *words: str,
        cwd: Path,
        preparations: Iterator[Any] | tuple[Any, ...] = (),
        script: Path | None = None,
    ) -> Drill:
        """A command, or another program, in its own process. A pause among ``preparations`` is written without its
        folder.
        """
        folder = self._folder / str(len(self._started))
        folder.mkdir()
        prepared = [[*p, str(folder)] if p[0] == "pause" else list(p) for p in preparations]
        request = {
            "words": list(words),
            "script": None if script is None else str(script),
            "folder": str(cwd),
            "environment": {**self.environment, "FTCLI_CACHE": str(cwd / "cache")},
            "preparations": prepared,
            "limits": {},
        }
        output = folder / "output"
        with output.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            connection, pid = _ask(self.socket, request, [nothing.fileno(), file.fileno(), file.fileno()])
        self._started.append(Drill(pid, connection, output, folder))
        return self._started[-1]

    def close(self) -> None:
        """Ends the server and whatever still runs."""
        for drill in self._started:
            drill.end()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(10)


def client(path: str, words: list[str]) -> int:
    """Runs one command as if it were this process: its streams, its signals, its status."""
    request: dict[str, Any] = {"words": words, "script": None, "folder": str(Path.cwd()), "preparations": []}
    request["environment"] = dict(os.environ)
    request["limits"] = {number: resource.getrlimit(number) for number in (resource.RLIMIT_FSIZE, resource.RLIMIT_DATA)}
    connection, pid = _ask(path, request, [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: os.kill(pid, received))
    status = _number(connection)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(client(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
