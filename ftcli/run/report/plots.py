"""Histograms and scatter plots of the report as inline SVG, in the style of its line charts."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ftcli.run.report.charts import BOTTOM, COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axes, grid, round_ticks, short
from ftcli.run.report.text import percent, tag
from ftcli.units import number

#: Bars of a histogram, about; dots of a scatter plot, and stretches whose medians are joined.
_BARS, _DOTS, _STRETCHES = 30, 600, 8
#: Points below which a median says nothing.
_FEW = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """Values with a name, such as all margins before training."""

    name: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Cloud:
    """Points with a name."""

    name: str
    points: Sequence[Point]


def histogram(title: str, samples: Sequence[Sample], name: str, note: str = "") -> Markup:
    """The share of each sample's values in bins that all samples have; empty without values.

    A sample that lies in one bin where another does not is a line: its bar would be taller than all others together.
    """
    samples = [one for one in samples if one.values]
    if not samples:
        return Markup()
    ends = [value for one in samples for value in one.values]
    edges = round_ticks(min(ends), max(ends), _BARS)
    width = edges[1] - edges[0]
    spread = [one for one in samples if max(one.values) - min(one.values) > width]
    drawn = [(one, _shares(one.values, edges)) for one in (spread or samples)]
    lines = [(one, statistics.median(one.values)) for one in samples if spread and one not in spread]
    highest = max(share for _, shares in drawn for share in shares)
    y_ticks = round_ticks(0.0, highest)
    axes = Axes(_x_ticks(edges[0], edges[-1]), y_ticks, (edges[0], edges[-1]), (0.0, y_ticks[-1]))
    place = {id(one): index for index, one in enumerate(samples)}
    body = [
        _zero(axes),
        *(_bars(axes, one.name, shares, edges, place[id(one)]) for one, shares in drawn),
        *(_line(axes, one.name, at, place[id(one)]) for one, at in lines),
    ]
    told = [f"{one.name}: median {number(statistics.median(one.values))}" for one in samples]
    keys = [_key(text, place[id(one)]) for text, one in zip(told, samples, strict=True)]
    return _figure(title, keys, note, f"{title}: {'; '.join(told)}", [grid(axes, name), *body])


def scatter(title: str, clouds: Sequence[Cloud], name: str, note: str = "") -> Markup:
    """Dots, and the median of each stretch of them; empty where all lie at one place of the horizontal axis."""
    clouds = [one for one in clouds if one.points]
    across = [x for one in clouds for x, _ in one.points]
    if not across or min(across) == max(across):
        return Markup()
    heights = [y for one in clouds for _, y in one.points]
    y_ticks = round_ticks(min(*heights, 0.0), max(*heights, 0.0))
    low, high = min(across), max(across)
    axes = Axes(_x_ticks(low, high), y_ticks, (low, high), (y_ticks[0], y_ticks[-1]))
    level = f"{axes.y(0):.1f}"
    body = [
        _zero(axes),
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=level, y2=level, class_="axis"),
        *(_dots(axes, one, index) for index, one in enumerate(clouds)),
        *(_medians(axes, one, index) for index, one in enumerate(clouds)),
    ]
    keys = [_key(one.name, index) for index, one in enumerate(clouds)] if len(clouds) > 1 else []
    keys.append(tag("span", "line: medians"))
    label = f"{title}: {len(across):,} points"
    return _figure(title, keys, note, label, [grid(axes, name), *body])


def _figure(title: str, keys: Sequence[Markup], note: str, label: str, body: Sequence[Markup]) -> Markup:
    legend = tag("span", *keys, *([tag("span", note)] if note else []), class_="legend")
    drawing = tag("svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=label, class_="linear")
    return tag("figure", tag("figcaption", tag("b", title), legend), drawing)


def _x_ticks(low: float, high: float) -> list[float]:
    return [tick for tick in round_ticks(low, high, 7) if low <= tick <= high]


def _shares(values: Sequence[float], edges: Sequence[float]) -> list[float]:
    """The share of values in each bin; the last one holds its upper edge, too."""
    width, counts = edges[1] - edges[0], [0] * (len(edges) - 1)
    for value in values:
        counts[min(max(math.floor((value - edges[0]) / width), 0), len(counts) - 1)] += 1
    return [count / len(values) for count in counts]


def _bars(axes: Axes, name: str, shares: Sequence[float], edges: Sequence[float], index: int) -> Markup:
    """Bars without gaps, with their outline; each tells its share."""
    outline = [(edges[0], 0.0)]
    for share, (left, right) in zip(shares, itertools.pairwise(edges), strict=True):
        outline += [(left, share), (right, share)]
    outline.append((edges[-1], 0.0))
    points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in outline)
    colour = f"s{index % COLOURS}"
    bars = [
        _told(axes, left, right, share, f"{name}: {percent(share)} from {short(left)} to {short(right)}")
        for share, (left, right) in zip(shares, itertools.pairwise(edges), strict=True)
        if share
    ]
    area = tag("polygon", points=points, class_=f"band {colour}")
    return Markup("").join([area, tag("polyline", points=points, class_=f"line thin {colour}"), *bars])


def _told(axes: Axes, left: float, right: float, share: float, text: str) -> Markup:
    x, y = axes.x(left), axes.y(share)
    size = {"width": f"{axes.x(right) - x:.1f}", "height": f"{HEIGHT - BOTTOM - y:.1f}"}
    return tag("g", tag("rect", x=f"{x:.1f}", y=f"{y:.1f}", **size), tag("title", text), class_="h")


def _line(axes: Axes, name: str, at: float, index: int) -> Markup:
    x = f"{axes.x(at):.1f}"
    line = tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_=f"line s{index % COLOURS}")
    return tag("g", line, tag("title", f"{name}: all around {number(at)}"))


def _zero(axes: Axes) -> Markup:
    """A dashed line at 0, where that is inside."""
    if not axes.x_range[0] < 0 < axes.x_range[1]:
        return Markup()
    x = f"{axes.x(0):.1f}"
    return tag("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")


def _dots(axes: Axes, cloud: Cloud, index: int) -> Markup:
    shown = cloud.points[:: max(1, math.ceil(len(cloud.points) / _DOTS))]
    dots = [tag("circle", cx=f"{axes.x(x):.1f}", cy=f"{axes.y(y):.1f}", r="2.6") for x, y in shown]
    return tag("g", *dots, class_=f"dots s{index % COLOURS}")


def _medians(axes: Axes, cloud: Cloud, index: int) -> Markup:
    """Joins the medians of stretches of equally many points; those of one place count as one stretch."""
    points = sorted(cloud.points)
    size = max(_FEW, math.ceil(len(points) / _STRETCHES))
    stretches = [points[start : start + size] for start in range(0, len(points), size)]
    found: dict[float, float] = {}
    for stretch in stretches:
        if len(stretch) >= _FEW:
            found[statistics.median(x for x, _ in stretch)] = statistics.median(y for _, y in stretch)
    if len(found) < 2:
        return Markup()
    line = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in found.items())
    return tag("polyline", points=line, class_=f"line s{index % COLOURS}")


def _key(name: str, index: int) -> Markup:
    return tag("span", tag("i", class_=f"s{index % COLOURS}"), name)
