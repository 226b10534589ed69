"""Line charts as inline SVG: axes with round ticks, several series, bands, values on hover, no script.

What they and the pages say is made here, too: values of JSON, which may be anything, as text for people; text of models
and data is made printable, and escaped by :class:`markupsafe.Markup`.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from ftcli.plain import is_number
from ftcli.units import number

Show = Callable[[float], str]


def or_dash(value: object, show: Show = number) -> str:
    """A number as ``show`` writes it; a dash for everything else."""
    return show(value) if is_number(value) else "–"


def count(value: object) -> str:
    """An integer as ``1,234``."""
    return f"{value:,}" if isinstance(value, int) else "–"


def as_text(value: Any) -> str:
    """A value of a recipe or manifest in a line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value) or "–"
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if item not in (None, False, {}, [], ())}
        if set(kept) == {"path"}:  # a dataset of which nothing else is said
            return as_text(kept["path"])
        return ", ".join(f"{key}: {as_text(item)}" for key, item in kept.items()) or "–"
    return str(value)


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufffe\uffff]")


def page_text(value: str) -> str:
    """``value`` with control characters as their pictures (NUL as ␀) and other unprintable ones as �."""
    if value.isprintable():  # far quicker than looking for them, and a page has thousands of values
        return value
    return _UNPRINTABLE.sub("\ufffd", _CONTROL.sub(lambda match: chr(0x2400 + ord(match[0])), value))


def printable(value: object) -> object:
    """Finished markup as it is; everything else as :func:`page_text`, which is still to be escaped."""
    return value if isinstance(value, Markup) else page_text(str(value))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element of a drawing. ``class_`` is the attribute ``class``, ``stroke_width`` is ``stroke-width``.

    Children and attributes are escaped unless they are markup; an attribute that is None is left out.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    # Plain text is put together from escaped parts: Markup's own format and join parse and escape anew in each call.
    opening = "".join([f' {key}="{escape(printable(value))}"' for key, value in pairs])
    inside = "".join([escape(printable(child)) for child in children])
    return Markup(f"<{name}{opening}>{inside}</{name}>")  # noqa: S704 every part is escaped


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


WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 14, 40
#: Colours of the style sheet; further series begin again.
COLOURS = 6
#: From this many points on, a smoothed line is drawn over the raw one.
SMOOTHED_FROM = 40
#: Up to this many points each is a dot of its own.
DOTTED_UP_TO = 30


@dataclass(frozen=True, slots=True)
class Series:
    """One line: ``points`` are (step, value) by rising step; None is a value that was not finite.

    Attributes:
        smooth: Draw the median of the points around over many of them.
        band: (step, lowest, highest), drawn as an area behind the line.
    """

    name: str
    points: Sequence[tuple[int, float | None]]
    smooth: bool = False
    dots: bool = False
    band: Sequence[tuple[int, float, float]] = ()

    @property
    def finite(self) -> list[tuple[int, float]]:
        """The points that have a value."""
        return [(step, value) for step, value in self.points if value is not None]


#: Values to compare with, by name, as horizontal lines: the base model's, for instance.
Levels = Mapping[str, float]
_NO_LEVELS: Levels = {}


@dataclass(frozen=True, slots=True)
class Axes:
    """The mapping of steps and values to the drawing, and the ticks."""

    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log: bool = False

    def x(self, step: float) -> float:
        """Horizontal place of a step."""
        low, high = self.x_range
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Vertical place of a value."""
        low, high = self.y_range
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


@dataclass(frozen=True, slots=True)
class ChartLook:
    """The drawing of a chart.

    Attributes:
        log: Let people switch to a logarithmic axis, where all values are above 0.
        marks: Steps at which the run was resumed, drawn as dashed lines.
        steps: First and last step of the step axis, so that charts of one run line up; those of the series if None.
    """

    from_zero: bool = False
    limits: tuple[float, float] | None = None
    log: bool = False
    show: Show = number
    marks: Sequence[int] = ()
    steps: tuple[int, int] | None = None
    note: str = ""


def line_chart(
    title: str, series: Sequence[Series], look: ChartLook | None = None, levels: Levels = _NO_LEVELS
) -> Markup:
    """A chart with its title and legend; empty when no series has a single value."""
    look = look or ChartLook()
    shown = [one for one in series if one.finite]
    if not shown:
        return Markup()
    drawn = [_drawing(title, shown, look, levels, log=False)]
    switch = []
    values = [*(value for one in shown for _, value in one.finite), *levels.values()]
    if look.log and min(values) > 0:
        name = "log-" + "".join(c if c.isalnum() else "-" for c in title.lower())
        switch = [
            tag("input", type="checkbox", class_="switch", id=name),
            tag("label", "log scale", for_=name),
        ]
        drawn.append(_drawing(title, shown, look, levels, log=True))
    caption = tag("figcaption", tag("b", title), _legend(shown, look, levels))
    return tag("figure", *switch, caption, *drawn)


def _legend(series: Sequence[Series], look: ChartLook, levels: Levels) -> Markup:
    keys = [key(one, i) for i, one in enumerate(series)] if len(series) > 1 or levels else []
    keys += [tag("span", tag("i", class_="level"), name) for name in levels]
    if any(_is_smoothed(one) for one in series):
        keys.append(tag("span", f"bold: median of {2 * SMOOTHED_REACH + 1} points around"))
    if look.note:
        keys.append(tag("span", look.note))
    return tag("span", *keys, class_="legend") if keys else Markup()


def _drawing(title: str, series: Sequence[Series], look: ChartLook, levels: Levels, *, log: bool) -> Markup:
    axes = _axes(series, look, levels, log=log)
    body = [
        grid(axes),
        *(tag("line", **vertical(axes, step), class_="mark") for step in look.marks if _inside(axes, step)),
        *(_band(axes, one, i) for i, one in enumerate(series)),
        *(_level(axes, name, value, look.show) for name, value in levels.items()),
        *(_line(axes, one, i) for i, one in enumerate(series)),
        *(_not_finite(axes, one) for one in series),
        _hover(axes, series, look.show),
    ]
    ends = [f"{one.name} ends at {look.show(one.finite[-1][1])}" for one in series]
    ends += [f"{name}: {look.show(value)}" for name, value in levels.items()]
    scale = ", logarithmic scale" if log else ""
    label = f"{title} by step{scale}: {'; '.join(ends)}"
    size = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *body, viewBox=size, role="img", aria_label=label, class_="log" if log else "linear")


def _axes(series: Sequence[Series], look: ChartLook, levels: Levels, *, log: bool) -> Axes:
    steps = [*(step for one in series for step, _ in one.points), *(look.steps or ())]
    values = [*(value for one in series for _, value in one.finite), *levels.values()]
    if not log:
        values += [end for one in series for _, low, high in one.band for end in (low, high)]
    low, high = min(values), max(values)
    if log:
        y_ticks = log_ticks(low, high)
    elif look.limits is not None and look.limits[0] <= low and high <= look.limits[1]:
        y_ticks = round_ticks(*look.limits)
    else:
        y_ticks = round_ticks(min(0.0, low) if look.from_zero else low, high)
    first, last = min(steps), max(steps)
    x_ticks = [t for t in round_ticks(first, last, 6) if first <= t <= last and t == int(t)]
    x_range = (first, last) if last > first else (first - 1, last + 1)
    return Axes(x_ticks or [first], y_ticks, x_range, (y_ticks[0], y_ticks[-1]), log)


def _inside(axes: Axes, step: int) -> bool:
    return axes.x_range[0] < step < axes.x_range[1]


def vertical(axes: Axes, step: float) -> dict[str, str]:
    """The ends of a vertical line through the whole drawing."""
    x = f"{axes.x(step):.1f}"
    return {"x1": x, "x2": x, "y1": str(TOP), "y2": str(HEIGHT - BOTTOM)}


def grid(axes: Axes, name: str = "step") -> Markup:
    """Lines and numbers of both axes, of which the horizontal one has a ``name``."""
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
    parts.append(tag("text", name, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 5, class_="tick mid"))
    return Markup("").join(parts)


def _band(axes: Axes, series: Series, index: int) -> Markup:
    if len(series.band) < 2:
        return Markup()
    band = series.band[:: max(1, math.ceil(len(series.band) / DRAWN_POINTS))]
    upper = [f"{axes.x(step):.1f},{axes.y(high):.1f}" for step, _, high in band]
    lower = [f"{axes.x(step):.1f},{axes.y(low):.1f}" for step, low, _ in reversed(band)]
    return tag("polygon", points=" ".join(upper + lower), class_=f"band s{index % COLOURS}")


def _level(axes: Axes, name: str, value: float, show: Callable[[float], str]) -> Markup:
    y = axes.y(value)
    above = y - 6 if y > TOP + 16 else y + 16
    return tag(
        "g",
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}"),
        tag("text", f"{name} {show(value)}", x=WIDTH - RIGHT - 4, y=f"{above:.1f}", class_="end"),
        class_="level",
    )


def _line(axes: Axes, series: Series, index: int) -> Markup:
    points = series.finite
    smooth = _is_smoothed(series)
    colour = f"s{index % COLOURS}"
    parts = [_path(axes, run, f"line {colour}" + (" raw" if smooth else "")) for run in _unbroken(series)]
    if smooth:
        parts.append(_path(axes, smoothed(points), f"line {colour}"))
    if series.dots or len(points) <= DOTTED_UP_TO:
        radius, kind = ("4.5", "point") if series.dots else ("2.6", "dot")
        parts += [
            tag("circle", cx=f"{axes.x(s):.1f}", cy=f"{axes.y(v):.1f}", r=radius, class_=f"{kind} {colour}")
            for s, v in thinned(points)
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
                tag("line", **vertical(axes, step)),
                *(
                    tag("circle", cx=f"{axes.x(step):.1f}", cy=f"{axes.y(v):.1f}", r="3.5", class_=f"s{i % COLOURS}")
                    for i, v in at[step]
                ),
                tag("title", text),
                class_="h",
            )
        )
    return Markup("").join(columns)


def key(series: Series, index: int) -> Markup:
    """A line's colour and name in the legend."""
    kind = " point" if series.dots else ""
    return tag("span", tag("i", class_=f"s{index % COLOURS}{kind}"), series.name)
