"""Work of unknown length that is given up after a while: regular expressions, and looking at rows.

There are expressions that take centuries on the wrong text, and a recipe, an adapter or a completion may hold one.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType


class TookTooLong(Exception):
    """The work was given up."""


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """A block that may take so long: TookTooLong is raised in it then.

    Only the main thread can be interrupted; elsewhere nothing is limited.
    """
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


class TimeBudget:
    """Seconds from now on, for work that asks. ``stopped`` says afterwards whether they were not enough."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.stopped = False

    def spent(self) -> bool:
        """True if the time is over; whoever is told so stops."""
        self.stopped = self.stopped or time.monotonic() >= self._end
        return self.stopped
