"""Measures how fast something counts up, and estimates the remaining time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

#: Counts that the pace is measured over, so that it follows changes and still averages out pauses for evaluation.
_WINDOW = 100
#: Below these nothing is foretold.
_FEWEST_COUNTS, _SHORTEST_SECONDS = 2, 1.0


class Pace:
    """Measures seconds per count, from the first one on: what comes before it is loading and compiling."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)

    def note(self, done: int) -> None:
        """``done`` is the count now."""
        if self._seen and done == self._seen[-1][1]:
            return
        self._seen.append((self._clock(), done))

    @property
    def counted(self) -> int:
        """Number of counts that the pace is measured over."""
        return self._seen[-1][1] - self._seen[0][1] if self._seen else 0

    @property
    def seconds_each(self) -> float | None:
        """Seconds for one more; None before enough has been measured."""
        if self.counted < _FEWEST_COUNTS:
            return None
        seconds = self._seen[-1][0] - self._seen[0][0]
        return seconds / self.counted if seconds >= _SHORTEST_SECONDS else None

    def seconds_left(self, total: int | None) -> float | None:
        """Seconds until the count is ``total``; None while that is unknown."""
        each = self.seconds_each
        if each is None or total is None:
            return None
        return max(0, total - self._seen[-1][1]) * each

    @property
    def elapsed(self) -> float:
        """Seconds since this was made."""
        return self._clock() - self._began
