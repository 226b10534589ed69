"""A function in a process of its own (:mod:`ftcli.judges.worker`): it can fail, hang, crash or end its process, and the
command goes on. A process is killed with all that it has started (:mod:`ftcli.judges.supervisor`) when it is late, and
made anew for the next call.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ftcli.judges.worker import MARK
from ftcli.plain import JsonMap, JsonObject

#: A file may load a model before it can be called.
LOAD_SECONDS = 600.0
#: What an alarm inside the process is given before the process is killed.
_GRACE_SECONDS = 1.0
#: No answer is longer: a score and some words for each completion.
_MOST_BYTES = 1 << 30
#: What the supervisor is given to end all that a function has started.
_END_SECONDS = 10.0
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


#: What a function has done that writes messages in its process' name.
NOT_ITS_OWN = "wrote into the socket that ftcli reads its answers from, a descriptor that is not its own,"


class CallTimedOut(Exception):
    """No answer in time; the process was killed."""


class WorkerGone(Exception):
    """The process ended by itself; the message says how, as a sentence about the function would."""


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """The code that a process loads: ``function`` of the file ``path``.

    ``address_space`` is a limit in bytes for code that works on untrusted text. Such a process gets nothing of the
    environment, and no network where the system allows it.
    """

    path: Path
    function: str
    address_space: int | None = None


class Worker:
    """One process, which is started at once and loads while others do something else."""

    def __init__(self, source: FunctionSource) -> None:
        self._source = source
        self._text = source.path.read_bytes()  # what every process of this command loads
        #: Processes so far: what an earlier one has made is gone.
        self.starts = 0
        self._closed = False
        self._start()

    def _start(self) -> None:
        if self._closed:
            raise WorkerGone("has ended with the command")
        self.starts += 1
        source = self._source
        ours, theirs = socket.socketpair()
        with theirs:
            words = ["worker", str(theirs.fileno()), str(os.getpid()), f"{source.path}:{source.function}"]
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a file that the recipe names
                [sys.executable, "-I", "-S", str(_SUPERVISOR), *words],
                stdin=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"} if source.address_space else None,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C ends training after the step, and that has to be scored
            )
        self._end = weakref.finalize(self, _end, self._process, ours)
        self.connection = ours
        self._loaded: JsonObject | None = None
        path = source.path.absolute()
        self._send(
            {
                "sys_path": sys.path,
                "path": str(path),
                "text": self._text,
                "shown": "" if source.address_space else str(source.path),
                "module": f"_ftcli_user_{hashlib.sha256(os.fsencode(path)).hexdigest()[:12]}",
                "function": source.function,
                "address_space": source.address_space,
            },
            LOAD_SECONDS,
        )

    def loaded(self) -> JsonObject:
        """Waits for the file. Empty, or why there is no function: ``raised`` or ``has``.

        Raises CallTimedOut, WorkerGone as :meth:`answer`.
        """
        if not self._end.alive:
            self._start()
        if self._loaded is None:
            self._loaded = self.answer(LOAD_SECONDS)
        return self._loaded

    def _require_loaded(self) -> None:
        found = self.loaded()
        if found:
            there = ", ".join(found.get("has", ())) or "none"
            raise WorkerGone(
                f"cannot be loaded: it {found.get('raised', f'is no class or function; the file has: {there}')}"
            )

    def ask(
        self,
        arguments: JsonMap,
        count: int,
        alarm: float | None = None,
        *,
        offered: Sequence[str] = (),
        seconds: float = LOAD_SECONDS,
    ) -> None:
        """Begins a call; a process that has ended is made anew.

        Args:
            count: How many numbers are expected.
            offered: Those of the arguments that a function without a parameter for them is called without.
            seconds: What the process has to take the call.
            alarm: Seconds after which a call is ended from within, where code in C does not hold that up.

        Raises CallTimedOut, WorkerGone: the file cannot be loaded, or not again.
        """
        self._require_loaded()
        call = {"arguments": dict(arguments), "count": count, "alarm": alarm, "offered": tuple(offered)}
        self._send(call, seconds)

    def do(self, what: str, *given: Any, seconds: float) -> JsonObject:
        """Has the environment do something, and waits for what comes of it. Raises CallTimedOut: it took longer than
        that; the process was killed; WorkerGone: the process ended, or the file cannot be loaded.
        """
        self._require_loaded()
        end = time.monotonic() + seconds
        self._send({"do": what, "given": given}, seconds)
        return self.answer(end - time.monotonic())

    def answer(self, seconds: float) -> JsonObject:
        """Waits for what the process answers to the last call.

        Raises CallTimedOut: it took longer than that; WorkerGone: the process ended.
        """
        end = time.monotonic() + max(seconds, 0.0)
        try:
            answered = self._message(end)
        except (EOFError, ConnectionError) as error:
            raise WorkerGone(self._how_it_ended()) from error
        except TimeoutError as error:
            self.end()
            raise CallTimedOut from error
        except (ValueError, RecursionError) as error:
            self.end()
            raise WorkerGone(NOT_ITS_OWN) from error
        except BaseException:
            self.end()  # its answer would be taken for that to the next call
            raise
        return answered

    def _message(self, end: float) -> JsonObject:
        """The next message, in time. Raises ValueError, RecursionError for anything that is no message of ours."""
        if self._exactly(len(MARK), end) != MARK:
            raise ValueError("no message")
        size = int.from_bytes(self._exactly(8, end))
        if size > _MOST_BYTES:
            raise ValueError("no message is so long")
        message = json.loads(self._exactly(size, end))
        if not _is_answer(message):
            raise ValueError("no answer is anything else")
        answer: JsonObject = message
        return answer

    def _exactly(self, size: int, end: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self.connection.settimeout(max(end - time.monotonic(), 1e-3))
            part = self.connection.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    @property
    def kept(self) -> int | None:
        """The number of the process that answered last; None where it is known to have ended."""
        return self.starts if self._end.alive else None

    def end(self) -> None:
        """Kills the process and all that it has started; the next call starts another."""
        self._end()

    def close(self) -> None:
        """Ends the process for good: a thread that waits for it is told that it is gone, and starts no other."""
        self._closed = True
        self._end()

    def _send(self, message: JsonMap, seconds: float) -> None:
        """Raises CallTimedOut where the process does not take it."""
        body = pickle.dumps(message)
        self.connection.settimeout(max(seconds, 1e-3))
        try:
            self.connection.sendall(MARK + len(body).to_bytes(8) + body)
        except TimeoutError as error:
            self.end()
            raise CallTimedOut from error
        except ConnectionError:
            return  # it has ended; :meth:`answer` says so

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_GRACE_SECONDS)  # the socket is closed a little before the status is there
        except subprocess.TimeoutExpired:
            return "closed the socket that ftcli reads its answers from, a descriptor that is not its own,"
        finally:
            self.end()
        if status >= 0:
            return f"tried to end the program (exit status {status})"
        names = {one.value: one.name for one in signal.Signals}
        return f"was ended by the signal {names.get(-status, -status)}"


def _is_answer(message: Any) -> bool:
    """True for a message of :mod:`ftcli.judges.worker`: the user's code may have written another one."""
    if not isinstance(message, dict):
        return False
    scores, bad, names = message.get("scores", []), message.get("bad", {}), message.get("has", [])
    if not (isinstance(scores, list) and isinstance(bad, dict) and isinstance(names, list)):
        return False
    words = [*bad.values(), *names, *(message[key] for key in ("raised", "shape", "environment") if key in message)]
    if not _is_of_environment(message):
        return False
    numbers = all(score is None or (isinstance(score, float) and math.isfinite(score)) for score in scores)
    return numbers and all(isinstance(word, str) for word in words)


def _is_of_environment(message: JsonMap) -> bool:
    """True if what an environment says beside scores is of the form of :mod:`ftcli.judges.worker`."""
    lists = [message.get(name, []) for name in ("tools", "results", "parts", "schemas")]
    if not isinstance(message.get("state", {}), dict):
        return False
    if not all(isinstance(one, list) for one in lists) or not isinstance(message.get("said"), str | None):
        return False
    tools, results, parts, schemas = lists
    pairs = all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], bool)
        for one in (*tools, *results)
    )
    return pairs and all(isinstance(one, str) for one in parts) and all(isinstance(one, dict) for one in schemas)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:  # the function has stopped the supervisor, say; with it ends the worker
        process.kill()
        process.wait()
    connection.close()


def ask_each(workers: Sequence[Worker], calls: Sequence[JsonMap], seconds: float) -> list[JsonObject]:
    """Calls for one number each, shared out among the processes as they become free.

    What was late says ``late``, and what ended its process ``raised``; see :mod:`ftcli.judges.worker`.
    """
    answers: list[JsonObject] = [{} for _ in calls]
    waiting = iter(range(len(calls)))
    busy: dict[Any, tuple[Worker, int, float]] = {}
    free = list(workers)
    while True:
        while free and (place := next(waiting, None)) is not None:
            worker = free.pop()
            worker.ask(calls[place], 1, seconds)
            busy[worker.connection] = (worker, place, time.monotonic() + seconds + _GRACE_SECONDS)
        if not busy:
            return answers
        next_due = min(due for _, _, due in busy.values())
        ready = wait(list(busy), max(next_due - time.monotonic(), 0.0))
        now = time.monotonic()
        for connection in [c for c, (_, _, due) in busy.items() if c in ready or due <= now]:
            worker, place, due = busy.pop(connection)
            answers[place] = _one(worker, due - now)
            free.append(worker)


def _one(worker: Worker, seconds: float) -> JsonObject:
    try:
        return worker.answer(seconds)
    except CallTimedOut:
        return {"late": True}
    except WorkerGone as error:
        return {"raised": str(error)}
