"""The server of drill.py: it imports everything once and runs each command in a fork of itself.

``python drill_server.py SOCKET`` answers until its stdin is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SECONDS = 60.0
_M_MMAP_THRESHOLD = -3  # malloc.h
_BLOCK = 1 << 16


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

    Blocks of 64 KiB and more are taken from the system one by one and given back at once; those that are free in the
    process itself are taken from it before.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK)

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def starved(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                libc.malloc_trim(0)
                lines = Path("/proc/self/status").read_text().splitlines()
                held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
                resource.setrlimit(resource.RLIMIT_DATA, (held, resource.RLIM_INFINITY))
                while libc.malloc(_BLOCK):
                    pass
                resource.setrlimit(resource.RLIMIT_DATA, (held + spare, resource.RLIM_INFINITY))
            return function(*args, **kwargs)

        return starved

    _wrap(target, around)


def fail(target: str, message: str, call: int = 1) -> None:
    """From its ``call``-th call on, ``target`` raises RuntimeError."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def failing(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= call:
                raise RuntimeError(message)
            return function(*args, **kwargs)

        return failing

    _wrap(target, around)


def scarce(what: str, rows: int) -> None:
    """Memory runs out in the middle of a forward pass of spread weights of more than ``rows`` rows: in `evaluation`, or
    in `generation`, where keys and values are kept.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def short(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_it = not self.training and ("cached" in kwargs) == (what == "generation")
            if is_it and isinstance(self, FSDPModule) and self.self_attn.layer_idx and len(hidden) > rows:
                raise torch.OutOfMemoryError
            return function(self, hidden, *args, **kwargs)

        return short

    _wrap("ftcli.model.fused:FusedDecoderLayer.compute", around)


def spoil(target: str, call: int) -> None:
    """In its ``call``-th call, ``target`` gives NaN."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args, **kwargs)
            return result * float("nan") if calls == call else result

        return spoilt

    _wrap(target, around)


def impatient(seconds: float) -> None:
    """The ranks of this process wait for others no longer than ``seconds`` without a sign of life."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        patience = importlib.import_module("ftcli.run.signs").Patience(told=seconds / 2, silent=seconds)
        return lambda self, place, reporter: function(self, place, reporter, patience)

    _wrap("ftcli.run.group:RankGroup.__init__", around)


def small_files(limit: int) -> None:
    """No file of this process may grow beyond ``limit`` bytes: the system refuses, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def workers(count: int) -> None:
    """Training data is collated in ``count`` worker processes."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: {**function(*args, **kwargs), "dataloader_num_workers": count}

    _wrap("ftcli.trainers.sft:training_arguments", around)


def few_held_out(count: int, folder: str) -> None:
    """Of each file of held-out data that ships with ftcli there are the first ``count`` rows, in ``folder``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def shortened(name: str, kind: str) -> Path | None:
            stem: Path | None = function(name, kind)
            if stem is None or not stem.name.endswith("-eval"):
                return stem
            short = Path(folder, f"{stem.name}.jsonl")
            if not short.exists():
                rows = Path(f"{stem}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
                short.write_text("".join(rows[:count]), encoding="utf-8")
            return short.with_suffix("")

        return shortened

    _wrap("ftcli.rows.places:bundled", around)


def bundled_models(folder: str) -> None:
    """The models that ship with ftcli are those in ``folder``."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def found(*parts: str) -> Path:
            path: Path = function(*parts)
            return Path(folder, *parts[1:]) if parts[0] == "models" else path

        return found

    for module in ("ftcli.assets", "ftcli.facts.config_file"):
        _wrap(f"{module}:asset", around)


def warm_children(socket: str) -> None:
    """The runs of a sweep are forks of the server, too: what `python -m ftcli` would start is its client."""
    client = [sys.executable, "-S", "-E", str(Path(__file__).with_name("drill.py")), socket]

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def started(command: list[str], **options: Any) -> Any:
            ours = command[1:4] == ["-P", "-m", "ftcli"]
            return function([*client, *command[4:]] if ours else command, **options)

        return started

    _wrap("ftcli.cli.children:subprocess.Popen", around)


_FAULTS = (pause, starve, fail, scarce, spoil, impatient, small_files, workers)
_SHORTCUTS = (few_held_out, bundled_models, warm_children)
_PREPARATIONS = {f.__name__: f for f in (*_FAULTS, *_SHORTCUTS)}


# -- the server ----------------------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Answers until stdin is closed."""
    gc.disable()
    from untouched import changed_by_imports  # which lies beside this file

    Path(path).with_name("imported.json").write_text(json.dumps(changed_by_imports()), encoding="utf-8")
    os.fsync = _unflushed
    _train_once(Path(path).parent)
    gc.enable()
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    Commands(listener).serve()


class Commands:
    """The commands that run, and who waits for each. A fork copies tables of a hundred thousand pages, so that each
    command is one, and this process waits for all.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._clients: dict[int, socket.socket] = {}
        self._ended, noted = os.pipe()
        os.set_blocking(noted, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # it need only be noted
        signal.set_wakeup_fd(noted, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Starts commands and tells how they ended, until stdin is closed."""
        os.write(1, b"ready\n")
        while True:
            places = [0, self._ended, self._listener, *self._clients.values()]
            ready, _, _ = select.select(places, [], [])
            if 0 in ready and os.read(0, 1) == b"":
                break
            if self._ended in ready:
                os.read(self._ended, _BLOCK)
                self._reap()
            for pid, client in list(self._clients.items()):
                if client in ready and _hung_up(client):  # a client that was killed is its command being killed
                    os.kill(pid, signal.SIGKILL)
                    self._clients.pop(pid).close()
            if self._listener in ready:
                self._start()
        for pid in self._clients:
            os.kill(pid, signal.SIGKILL)

    def _start(self) -> None:
        connection, _ = self._listener.accept()
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (connection, self._listener, *self._clients.values()):
                one.close()
            _become(json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._clients[child] = connection
        _tell(connection, child)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                pid, status = ended
                if pid == 0:
                    break
                client = self._clients.pop(pid, None)
                if client is not None:
                    _tell(client, os.waitstatus_to_exitcode(status))
                    client.close()


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):
        client.sendall(f"{number}\n".encode())


def _hung_up(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except OSError:
        return True


def _unflushed(file: int) -> None:
    """In place of ``os.fsync``, as in tests/quick.py: processes are killed here, and the power stays on."""
    os.fstat(file)


def _train_once(folder: Path) -> None:
    """What libraries prepare in their first step, evaluation and checkpoint they need not prepare in every command."""
    from ftcli.cli.app import main

    settings = (
        "version: 1\n"
        "model: {name_or_path: bundled:tiny-gemma2, dtype: float32}\n"
        "lora: {r: 4}\n"
        "train: {max_steps: 1, per_device_train_batch_size: 4}\n"
        "checkpoint: {every_steps: 1}\n"
    )
    recipes = {
        "train": "data: {train: [{path: bundled:smoke-train, max_rows: 4}], "
        "eval: [{path: bundled:smoke-eval, max_rows: 2}], max_seq_len: 64}\n"
        "eval: {generate: {max_new_tokens: 2}}\n",
        "grpo": "data: {train: [{path: bundled:smoke-grpo-train, max_rows: 4}], max_seq_len: 64}\n"
        "grpo: {num_generations: 4, max_prompt_length: 48, max_completion_length: 4, "
        "rewards: [{use: regex, pattern: '[0-9]'}]}\n",
    }
    for command, more in recipes.items():
        recipe, said = folder / f"warm-{command}.yaml", io.StringIO()
        recipe.write_text(settings + more, encoding="utf-8")
        words = [command, str(recipe), "--output-dir", str(folder / f"warm-{command}"), "--offline", "--quiet"]
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            assert main(words) == 0, said.getvalue()


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    from ftcli.cli.app import main

    status = 99
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for number in request["closed"]:
            os.close(number)
        sys.stdin, sys.stdout, sys.stderr = (
            None if number in request["closed"] else os.fdopen(number, mode, closefd=False)
            for number, mode in enumerate(("r", "w", "w"))
        )
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number in (signal.SIGTERM, signal.SIGHUP):  # the tests themselves may run under nohup
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, limits in request["limits"].items():
            resource.setrlimit(int(number), tuple(limits))
        for name, *arguments in request["preparations"]:
            _PREPARATIONS[name](*arguments)
        status = main(request["words"]) if request["script"] is None else _script(request["script"], request["words"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


def _script(path: str, words: list[str]) -> int:
    """Runs a Python file as a program; its exit status."""
    sys.argv = [path, *words]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    serve(sys.argv[1])
