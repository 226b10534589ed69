"""A time limit for looking at rows, where not all of them have to be seen."""

from __future__ import annotations

import time


class Budget:
    """Seconds from now on. ``stopped`` says afterwards whether they were not enough."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.stopped = False

    def spent(self) -> bool:
        """Whether the time is over; who is told so stops."""
        self.stopped = self.stopped or time.monotonic() >= self._end
        return self.stopped


class OutOfTime(Exception):
    """A budget was spent before the last row of a source; the first ``rows`` of it were looked at."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__(f"stopped after {rows} rows")
