"""Numbers of a chart: ticks, texts, smoothing and thinning."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ftcli.units import number

#: Points drawn at most; beyond that each stretch of steps is drawn as its lowest and its highest value.
DRAWN_POINTS = 400
#: Points on either side that the smoothed line is the median of.
SMOOTHED_REACH = 10


def round_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About ``wanted`` round numbers (steps of 1, 2 or 5 times a power of ten) from at or below ``low`` to at or
    above ``high``."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / max(1, wanted - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, both above 0: 1, 2 and 5 times powers of ten, or
    powers of ten alone where these would be too many."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 7))
    powers = range(first, last + every, every)
    fine = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [round(m * 10.0**power, 12 - power) for power in powers for m in fine]
    below = [tick for tick in ticks if tick <= low * 1.0001]
    above = [tick for tick in ticks if tick >= high * 0.9999]
    start, end = (below or ticks)[-1], next((tick for tick in above if tick > (below or ticks)[-1]), ticks[-1])
    chosen = [tick for tick in ticks if start <= tick <= end]
    return chosen if len(chosen) > 1 else [start, start * 10]


def short(value: float) -> str:
    """A number for a tick: 12k · 3.4M · 0.01 · 5e-5."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.4g}{unit}"
    return number(value)


def smoothed(points: Sequence[tuple[int, float]], reach: int = SMOOTHED_REACH) -> list[tuple[int, float]]:
    """The median of each point with as many before as after it, at most ``reach`` each.

    It neither lags nor leads, and where a curve only falls it is that curve: a mean would lie far above the values
    around a steep beginning. Towards both ends there are fewer points, so that it begins and ends with what was logged.
    """
    values = [value for _, value in points]
    result = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)
        result.append((step, statistics.median(values[i - near : i + near + 1])))
    return result


def thinned(points: Sequence[tuple[int, float]], limit: int = DRAWN_POINTS) -> list[tuple[int, float]]:
    """At most ``limit`` points that keep every peak: of each stretch its lowest and its highest one."""
    if len(points) <= limit:
        return list(points)
    size = len(points) / (limit // 2)
    kept: list[tuple[int, float]] = []
    for i in range(limit // 2):
        stretch = points[int(i * size) : int((i + 1) * size)]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept
