"""Output that cannot be written (a log reader that has left, a full disk, a terminal that is gone) never ends a run."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast


class _Unfailing(io.TextIOBase):
    """A text stream that drops what cannot be written. What it does not have itself is asked of the real stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        #: What the handler of a signal wrote in the middle of a write. It waits for that one's end.
        self._late: list[str] = []

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            try:
                self._stream.write(text)
            except RuntimeError:  # "reentrant call"
                self._late.append(text)
            else:
                self._catch_up()
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._stream.flush()
            self._catch_up()

    def _catch_up(self) -> None:
        while self._late:
            self._stream.write(self._late.pop(0))
            self._stream.flush()

    def close(self) -> None:
        """Leaves the real stream open: it belongs to the process."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> Any:
        return self._stream.buffer


def unfailing(stream: TextIO) -> TextIO:
    """``stream``, whose writes do not fail."""
    return cast("TextIO", _Unfailing(stream))


def open_missing_streams() -> None:
    """Gives a process that was started without stdin, stdout or stderr (``>&-``) the null device in their place.

    Otherwise the next file that is opened, a checkpoint say, takes their number, and whatever is printed goes into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is taken, which is this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))


def let_go_of_broken_streams() -> None:
    """Replaces stdout or stderr if it cannot be written any more, so that Python does not complain when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, stream.fileno())
                os.close(null)
