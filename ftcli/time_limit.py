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

#: Seconds until an alarm that came too early is asked again.
_SOONEST = 0.01


class TookTooLong(Exception):
    """The work was given up."""


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """A block that may compute so long: TookTooLong is raised in it then.

    What counts is the time in which this thread computed: a machine where others work takes longer for the same. Only
    the main thread can be interrupted; elsewhere nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    end = time.thread_time() + seconds

    def expire(_number: int, _frame: FrameType | None) -> None:
        left = end - time.thread_time()
        if left <= 0:
            raise TookTooLong
        signal.setitimer(signal.ITIMER_REAL, max(left, _SOONEST))

    others = signal.getitimer(signal.ITIMER_REAL)  # the user's own alarm, if there is one, comes later
    before = signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
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
