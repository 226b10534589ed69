"""Regular expressions on completions, the same for rewards and tasks: Python's ``re``, ``search``, DOTALL, and bounds.

A completion is untrusted text. There are expressions that take centuries on the wrong one.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: An expression sees only this much of a completion, so that a slow one cannot hold up training.
MAX_MATCHED_CHARS = 20_000
#: And is given up after so long.
SECONDS = 1.0


class TookTooLong(Exception):
    """An expression was given up."""


class Pattern:
    """A regular expression that a reward or a task names. Raises re.error where it is none."""

    def __init__(self, expression: str) -> None:
        self._compiled = re.compile(expression, re.DOTALL)

    def search(self, text: str) -> re.Match[str] | None:
        """The first match anywhere in the first 20,000 characters; ``.`` matches line breaks too.

        Raises TookTooLong after a second, where this is the main thread: only there a signal can end a search.
        """
        with _limited(SECONDS):
            return self._compiled.search(text[:MAX_MATCHED_CHARS])


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, expire)
    try:
        others = signal.setitimer(signal.ITIMER_REAL, seconds)  # the user's own alarm, if there is one, comes later
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before if before is not None else signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *others)
