"""The server of drill.py: it imports everything once and runs each command in a fork of itself.

``python -m tests.e2e.drill_server SOCKET`` answers until its stdin is closed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import marshal
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.e2e import drill_clean
from tests.e2e.drill_preparations import PREPARATIONS

_BLOCK = 1 << 16


def serve(path: str) -> None:
    """Answers until stdin is closed."""
    drill_clean.offer(f"{path}-clean")
    gc.disable()
    from tests.e2e.untouched import changed_by_imports

    Path(path).with_name("imported.json").write_text(json.dumps(changed_by_imports()), encoding="utf-8")
    os.fsync = _unflushed
    gc.freeze()  # a million objects, which training would search for garbage
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
            _become(marshal.loads(message), descriptors)
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
        tempfile.tempdir = None  # asked for anew, of this environment
        os.chdir(request["folder"])
        for number in (signal.SIGTERM, signal.SIGHUP):  # the tests themselves may run under nohup
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, limits in request["limits"].items():
            resource.setrlimit(number, limits)
        for name, *arguments in json.loads(request["preparations"]):
            PREPARATIONS[name](*arguments)
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
