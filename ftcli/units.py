"""Numbers, of bytes and times too, as text for people; how fast something counts up, and the time that remains."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

GIB = 2**30


def gib(count: float) -> str:
    """Bytes as a number of GiB, without the unit: one decimal, two below 1."""
    value = count / GIB
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(count: float, *, smallest: Literal["B", "KiB", "MiB"] = "B") -> str:
    """Bytes with the binary unit that fits, such as `1.50 MiB`; no unit below ``smallest`` is used."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor or unit == smallest:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """A number for people, to four digits: 12,345 · 0.0123 · 1.5e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1000 <= size < 1e12:
        return f"{value:,.0f}"
    if size < 1e-3 or size >= 1e12:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def percent(value: float) -> str:
    """A share as ``12.3%``."""
    return f"{100 * value:.1f}%"


def is_share(*values: float) -> bool:
    """True if scores of a task can be shares, which a function of the user's need not return."""
    return all(0 <= value <= 1 for value in values)


def score(value: float) -> str:
    """The score of a task: a share as ``12.3%``, and everything else as the number that it is."""
    return percent(value) if is_share(value) else number(value)


def duration(seconds: float) -> str:
    """A time in two units at most, without spaces: `32s`, `3m05s`, `12h34m`, `3d04h`."""
    whole = max(0, round(seconds))
    for unit, smaller, length, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}{smaller}"
    return f"{whole}s"


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
