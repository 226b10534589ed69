"""A process in a terminal of its own, for tests. Each wait has an end, and what was started is killed in the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence

from tests.e2e.drill import Server

#: Of one wait. Loading the libraries takes some ten seconds where several tests share a core.
SECONDS = 600.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]")


class Terminal:
    """ftcli in a terminal, what it has shown, and what is typed; made by :func:`in_terminal`."""

    def __init__(self, command: Sequence[str], columns: int) -> None:
        self._own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_TERMINAL, *command],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**environment, "TERM": "xterm-256color", "NO_COLOR": "1", "INPUTRC": os.devnull},
            start_new_session=True,
        )
        os.close(other)
        self._bytes = b""

    def type(self, text: str) -> None:
        """Types, as keys on a keyboard."""
        os.write(self._own, text.encode())

    def shown(self) -> str:
        """Everything so far, as one reads it."""
        return ESCAPE.sub("", self._bytes.decode(errors="replace")).replace("\r\n", "\n").replace("\r", "")

    def lines(self) -> list[str]:
        """All lines so far that are not empty, also those that were drawn over."""
        text = ESCAPE.sub("", self._bytes.decode(errors="replace"))
        return [line for line in re.split(r"[\r\n]+", text) if line.strip()]

    def wait_for(self, pattern: str, times: int = 1) -> str:
        """What is shown once ``pattern`` has come so often."""
        until = time.monotonic() + SECONDS
        while len(re.findall(pattern, self.shown(), re.MULTILINE)) < times:
            assert self._read(until), f"{pattern} did not come {times} times; shown:\n{self.shown()}"
        return self.shown()

    def end(self) -> int:
        """The status, once the process has ended."""
        until = time.monotonic() + SECONDS
        while self._read(until):
            pass
        return self.process.wait(timeout=max(1.0, until - time.monotonic()))

    def close(self) -> None:
        """Kills all that runs in the terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=600)
        os.close(self._own)

    def _read(self, until: float) -> bool:
        """Takes what there is, waiting for it; False where the time is up or nothing comes any more."""
        left = until - time.monotonic()
        if left <= 0 or not select.select([self._own], [], [], left)[0]:
            return False
        try:
            piece = os.read(self._own, 1 << 16)
        except OSError:  # how Linux says that the other side is closed
            return False
        self._bytes += piece
        return bool(piece)


#: The new session takes the terminal for its own, so that Ctrl-C typed there is a signal; a shell's `&` would have it
#: ignored.
_IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextlib.contextmanager
def in_terminal(*words: str, columns: int = 80, server: Server | None = None) -> Iterator[Terminal]:
    """``ftcli`` with these words in a terminal of that width, killed at the end of the block.

    Args:
        server: Runs it in a fork of itself, which starts in a moment.
    """
    client = ["-m", "ftcli"] if server is None else server.client[1:]
    terminal = Terminal([*client, *words], columns)
    try:
        yield terminal
    finally:
        terminal.close()
