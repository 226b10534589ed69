"""Line charts as inline SVG: axes with round ticks, several series, values on hover, no script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ftcli.run.report.markup import tag

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 14, 40
#: Colours of the style sheet; further series begin again.
COLOURS = 6
#: Points drawn at most; beyond that each stretch of steps is drawn as its lowest and its highest value.
DRAWN_POINTS = 400
#: From this many points on, a smoothed line is drawn over the raw one.
SMOOTHED_FROM = 40
#: Points on either side that the smoothed line is the mean of.
SMOOTHED_REACH = 10


@dataclass(frozen=True, slots=True)
class Series:
    """One line: ``points`` are (step, value) by rising step; None is a value that was not finite."""

    name: str
    points: Sequence[tuple[int, float | None]]
    smooth: bool = False

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The points that have a value."""
        return [(step, value) for step, value in self.points if value is not None]


@dataclass(frozen=True, slots=True)
class Axes:
    """The mapping of steps and values to the drawing, and the ticks."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, step: float) -> float:
        """Horizontal place of a step."""
        low, high = self.x_range
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        low, high = self.y_range
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


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


def short(value: float) -> str:
    """A number for a tick: 12k · 3.4M · 0.01 · 5e-5."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.4g}{unit}"
    return number(value)


def smoothed(points: Sequence[tuple[int, float]], reach: int = SMOOTHED_REACH) -> list[tuple[int, float]]:
    """The mean of each point with as many before as after it, at most ``reach`` each; it neither lags nor leads.

    Towards both ends there are fewer, so that the line begins and ends with the very values that were logged.
    """
    values = [value for _, value in points]
    result = []
    for i, (step, _) in enumerate(points):
        near = min(reach, i, len(points) - 1 - i)
        result.append((step, math.fsum(values[i - near : i + near + 1]) / (2 * near + 1)))
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


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    from_zero: bool = False,
    show: Callable[[float], str] = number,
    marks: Iterable[int] = (),
    steps: tuple[int, int] | None = None,
) -> Markup | None:
    """A chart with its title and legend, or None when no series has a single value.

    Args:
        from_zero: Let the value axis begin at 0.
        show: Renders a value in the hover text.
        marks: Steps at which the run was resumed, drawn as dashed lines.
        steps: First and last step of the step axis, so that charts of one run line up; those of the series if None.
    """
    shown = [one for one in series if one.finite]
    if not shown:
        return None
    axes = _axes(shown, from_zero, steps)
    body = [
        _grid(axes),
        *(tag("line", **_vertical(axes, step), class_="mark") for step in marks if _inside(axes, step)),
        *(_line(axes, one, i) for i, one in enumerate(shown)),
        *(_not_finite(axes, one) for one in shown),
        _hover(axes, shown, show),
    ]
    last = "; ".join(f"{one.name} ends at {show(one.finite[-1][1])}" for one in shown)
    drawing = tag("svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{title}: {last}")
    keys = [_key(one, i) for i, one in enumerate(shown)] if len(shown) > 1 else []
    if any(_is_smoothed(one) for one in shown):
        keys.append(tag("span", f"bold: mean of {2 * SMOOTHED_REACH + 1} points around"))
    legend = tag("span", *keys, class_="legend") if keys else ""
    return tag("figure", tag("figcaption", tag("b", title), legend), drawing)


def _axes(series: Sequence[Series], from_zero: bool, limits: tuple[int, int] | None) -> Axes:
    steps = [*(step for one in series for step, _ in one.points), *(limits or ())]
    values = [value for one in series for _, value in one.finite]
    low, high = min(values), max(values)
    y_ticks = round_ticks(min(0.0, low) if from_zero else low, high)
    first, last = min(steps), max(steps)
    x_ticks = [t for t in round_ticks(first, last, 6) if first <= t <= last and t == int(t)]
    x_range = (first, last) if last > first else (first - 1, last + 1)
    return Axes(x_ticks or [first], y_ticks, x_range, (y_ticks[0], y_ticks[-1]))


def _inside(axes: Axes, step: int) -> bool:
    return axes.x_range[0] < step < axes.x_range[1]


def _vertical(axes: Axes, step: float) -> dict[str, str]:
    x = f"{axes.x(step):.1f}"
    return {"x1": x, "x2": x, "y1": str(TOP), "y2": str(HEIGHT - BOTTOM)}


def _grid(axes: Axes) -> Markup:
    parts = []
    for value in axes.y_ticks:
        y = f"{axes.y(value):.1f}"
        parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(tag("text", short(value), x=LEFT - 8, y=y, dy="0.32em", class_="tick end"))
    for step in axes.x_ticks:
        x = f"{axes.x(step):.1f}"
        parts.append(tag("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="axis"))
        parts.append(tag("text", short(step), x=x, y=HEIGHT - BOTTOM + 18, class_="tick mid"))
    base = HEIGHT - BOTTOM
    parts.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, class_="axis"))
    parts.append(tag("text", "step", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5, class_="tick mid"))
    return Markup("").join(parts)


def _line(axes: Axes, series: Series, index: int) -> Markup:
    points = series.finite
    smooth = _is_smoothed(series)
    parts = [_path(axes, run, f"line s{index % COLOURS}" + (" raw" if smooth else "")) for run in _unbroken(series)]
    if smooth:
        parts.append(_path(axes, smoothed(points), f"line s{index % COLOURS}"))
    if len(points) <= 30:
        parts += [
            tag("circle", cx=f"{axes.x(s):.1f}", cy=f"{axes.y(v):.1f}", r="2.6", class_=f"dot s{index % COLOURS}")
            for s, v in points
        ]
    return Markup("").join(parts)


def _is_smoothed(series: Series) -> bool:
    return series.smooth and len(series.finite) >= SMOOTHED_FROM


def _unbroken(series: Series) -> list[list[tuple[int, float]]]:
    """The stretches between values that were not finite."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in series.points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _path(axes: Axes, points: Sequence[tuple[int, float]], class_: str) -> Markup:
    coordinates = " ".join(f"{axes.x(step):.1f},{axes.y(value):.1f}" for step, value in thinned(points))
    return tag("polyline", points=coordinates, class_=class_)


def _not_finite(axes: Axes, series: Series) -> Markup:
    bad = [step for step, value in series.points if value is None][:DRAWN_POINTS]
    return Markup("").join(
        tag(
            "text",
            "✕",
            tag("title", f"{series.name} was not finite at step {step}"),
            x=f"{axes.x(step):.1f}",
            y=HEIGHT - BOTTOM - 4,
            class_="bad mid",
        )
        for step in bad
    )


def _hover(axes: Axes, series: Sequence[Series], show: Callable[[float], str]) -> Markup:
    """Invisible columns; the one under the pointer shows its values as a tooltip and as dots."""
    at: dict[int, list[tuple[int, float]]] = {}
    for index, one in enumerate(series):
        for step, value in thinned(one.finite):
            at.setdefault(step, []).append((index, value))
    steps = sorted(at)
    edges = [axes.x_range[0], *((a + b) / 2 for a, b in itertools.pairwise(steps)), axes.x_range[1]]
    columns = []
    for step, left, right in zip(steps, edges, edges[1:], strict=False):
        text = "\n".join([f"step {step:,}", *(f"{series[i].name}: {show(value)}" for i, value in at[step])])
        x, width = axes.x(left), max(1.0, axes.x(right) - axes.x(left))
        columns.append(
            tag(
                "g",
                tag("rect", x=f"{x:.1f}", y=TOP, width=f"{width:.1f}", height=HEIGHT - TOP - BOTTOM),
                tag("line", **_vertical(axes, step)),
                *(
                    tag("circle", cx=f"{axes.x(step):.1f}", cy=f"{axes.y(v):.1f}", r="3.5", class_=f"s{i % COLOURS}")
                    for i, v in at[step]
                ),
                tag("title", text),
                class_="h",
            )
        )
    return Markup("").join(columns)


def _key(series: Series, index: int) -> Markup:
    return tag("span", tag("i", class_=f"s{index % COLOURS}"), series.name)
