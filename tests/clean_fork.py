"""The process that loads exports again, as a fork of a test worker that has imported plain libraries and nothing else.

A worker imports them for its tests in any case. So the process is there at once, where an interpreter of its own would
import them for seconds; tests/e2e/test_wheel.py has the one that users have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ftcli.export.clean.process import CleanProcess

_LIBRARIES = (
    "torch",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.gemma2.modeling_gemma2",
    "transformers.models.llama.modeling_llama",
)


def import_libraries() -> None:
    """Plain libraries, as that process has them."""
    gc.disable()  # a million objects are not searched for garbage again and again
    for name in _LIBRARIES:
        importlib.import_module(name)
    gc.enable()


class Fork:
    """A child of this process that answers requests; what :class:`CleanProcess` uses of a Popen."""

    stdin: IO[str]
    stdout: IO[str]

    def __init__(self) -> None:
        import_libraries()
        asked, ask = os.pipe()
        say, answer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            serve(asked, answer, ask, say)
        os.close(asked)
        os.close(answer)
        self.stdin, self.stdout = os.fdopen(ask, "w", encoding="utf-8"), os.fdopen(say, encoding="utf-8")

    def kill(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status; -9 for signal 9."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def communicate(self) -> None:
        """Waits for its end."""
        self.wait()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()

    def close(self) -> None:
        """Ends it where no test has asked it anything."""
        if not self.stdin.closed:
            self.kill()
            self.communicate()
            self.stdout.close()


def serve(asked: int, answer: int, *others: int) -> NoReturn:
    """What the child does, and nothing else; it closes the ``others`` among what it has open."""
    status, told = 1, os.dup(2)
    try:
        for descriptor in others:  # it ends when its questions do: no end of theirs may be its own
            os.close(descriptor)
        nothing = os.open(os.devnull, os.O_WRONLY)
        for descriptor, place in ((asked, 0), (answer, 1), (nothing, 2)):
            os.dup2(descriptor, place)
            os.close(descriptor)
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(place, mode, encoding="utf-8", closefd=False) for place, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        warnings.resetwarnings()  # a test's are errors; an interpreter of its own would tell them
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
        sys.path.append(str(Path(__file__).parents[1]))
        from ftcli.export.clean.answering import serve

        serve()
        status = 0
    except Exception:
        os.write(told, traceback.format_exc().encode())
        raise
    finally:
        os._exit(status)


def adopt(process: CleanProcess, fork: Fork) -> None:
    """``process`` asks this child until it is closed."""
    from ftcli.export.clean.process import _listen

    def listen() -> None:
        with fork.stdout as stream:
            _listen(stream, process._said)

    running: Any = fork
    process._running, process._said = running, queue.SimpleQueue()
    threading.Thread(target=listen, daemon=True).start()
