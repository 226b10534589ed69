"""The report's section on held-out pairs or labelled answers: margins before and after, by length and by source, and
the rows that the model still has wrong. Made from margins.json, which may hold anything; histograms and scatter plots
are inline SVG in the style of the line charts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from ftcli.plain import JsonMap, JsonObject, is_number, map_in, maps, number_or_none
from ftcli.run.report.charts import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    Axes,
    Series,
    count,
    grid,
    key,
    or_dash,
    round_ticks,
    short,
    tag,
    vertical,
)
from ftcli.run.report.samples import ClippedText, clipped
from ftcli.run.report.tables import Table
from ftcli.units import number, percent

#: Bars of a histogram, about; dots of a scatter plot, and stretches whose medians are joined.
_BARS, _DOTS, _STRETCHES = 30, 600, 8
#: Points below which a median says nothing.
_FEW = 5

Point = tuple[float, float]


def histogram(title: str, samples: Mapping[str, Sequence[float]], name: str, note: str = "") -> Markup:
    """The share of each sample's values, by its name, in bins that all samples have; empty without values.

    A sample that lies in one bin where another does not is a line: its bar would be taller than all others together.
    """
    samples = {each: values for each, values in samples.items() if values}
    if not samples:
        return Markup()
    ends = [value for values in samples.values() for value in values]
    edges = round_ticks(min(ends), max(ends), _BARS)
    width = edges[1] - edges[0]
    spread = [each for each, values in samples.items() if max(values) - min(values) > width]
    drawn = {each: _shares(samples[each], edges) for each in spread or samples}
    medians = {each: statistics.median(values) for each, values in samples.items()}
    highest = max(share for shares in drawn.values() for share in shares)
    y_ticks = round_ticks(0.0, highest)
    axes = Axes(_x_ticks(edges[0], edges[-1]), y_ticks, (edges[0], edges[-1]), (0.0, y_ticks[-1]))
    place = {each: index for index, each in enumerate(samples)}
    body = [
        _zero(axes),
        *(_bars(axes, each, shares, edges, place[each]) for each, shares in drawn.items()),
        *(_line(axes, each, medians[each], place[each]) for each in samples if each not in drawn),
    ]
    told = [f"{each}: median {number(median)}" for each, median in medians.items()]
    keys = [key(Series(text, ()), index) for index, text in enumerate(told)]
    return _figure(title, keys, note, f"{title}: {'; '.join(told)}", [grid(axes, name), *body])


def scatter(title: str, clouds: Mapping[str, Sequence[Point]], name: str) -> Markup:
    """Dots by the name of their cloud, and the median of each stretch of them; empty where all lie at one place of the
    horizontal axis.
    """
    clouds = {each: points for each, points in clouds.items() if points}
    across = [x for points in clouds.values() for x, _ in points]
    if not across or min(across) == max(across):
        return Markup()
    heights = [y for points in clouds.values() for _, y in points]
    y_ticks = round_ticks(min(*heights, 0.0), max(*heights, 0.0))
    low, high = min(across), max(across)
    axes = Axes(_x_ticks(low, high), y_ticks, (low, high), (y_ticks[0], y_ticks[-1]))
    level = f"{axes.y(0):.1f}"
    body = [
        _zero(axes),
        tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=level, y2=level, class_="axis"),
        *(_dots(axes, points, index) for index, points in enumerate(clouds.values())),
        *(_medians(axes, points, index) for index, points in enumerate(clouds.values())),
    ]
    keys = [key(Series(each, ()), index) for index, each in enumerate(clouds)] if len(clouds) > 1 else []
    keys.append(tag("span", "line: medians"))
    label = f"{title}: {len(across):,} points"
    return _figure(title, keys, "", label, [grid(axes, name), *body])


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
    line = tag("line", **vertical(axes, at), class_=f"line s{index % COLOURS}")
    return tag("g", line, tag("title", f"{name}: all around {number(at)}"))


def _zero(axes: Axes) -> Markup:
    """A dashed line at 0, where that is inside."""
    if not axes.x_range[0] < 0 < axes.x_range[1]:
        return Markup()
    return tag("line", **vertical(axes, 0), class_="mark")


def _dots(axes: Axes, points: Sequence[Point], index: int) -> Markup:
    shown = points[:: max(1, math.ceil(len(points) / _DOTS))]
    dots = [tag("circle", cx=f"{axes.x(x):.1f}", cy=f"{axes.y(y):.1f}", r="2.6") for x, y in shown]
    return tag("g", *dots, class_=f"dots s{index % COLOURS}")


def _medians(axes: Axes, dots: Sequence[Point], index: int) -> Markup:
    """Joins the medians of stretches of equally many points; those of one place count as one stretch."""
    points = sorted(dots)
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


#: Rows of a table, and of those shown with their texts.
_MOST_ROWS, _MOST_WRONG = 50, 8
_LABELS: Mapping[int, str] = {1: "desirable", -1: "undesirable"}


def held_out_rows(margins: JsonMap) -> JsonObject | None:
    """The section; None where nothing was measured.

    It has ``title``, ``note`` (which rows, and when), ``charts``, ``tables`` by title, and the rows that are ``wrong``,
    under the heads ``columns``: where one stands, its prompt, its answers by head, and its margin.
    """
    before, after = map_in(margins, "before"), map_in(margins, "after")
    newest, step = after or before, margins.get("step")
    if not _numbers(newest.get("margins")):
        return None
    sides = {"before training": before, f"after step {count(step)}" if is_number(step) else "after training": after}
    pairs = newest.get("kind") == "pairs"
    unit = "pairs" if pairs else "labelled answers"
    drawn, rows = len(_numbers(newest.get("margins"))), newest.get("rows")
    note = f"{count(rows)} held-out {unit}" + (f", {drawn:,} of them drawn" if rows != drawn else "")
    return {
        "title": "Held-out pairs" if pairs else "Held-out answers",
        "note": f"{note}; {count(newest.get('wrong'))} on the wrong side {'before' if newest is before else 'now'}.",
        "charts": [chart for chart in (_of_pairs(sides) if pairs else _of_answers(newest)) if chart],
        "tables": _tables(before, after),
        "wrong": [_wrong(row, pairs=pairs) for row in maps(newest.get("worst"))[:_MOST_WRONG]],
        "columns": ("Chosen", "Rejected", "Margin") if pairs else ("Answer", "Label", "Reward"),
    }


def _of_pairs(sides: Mapping[str, JsonMap]) -> list[Markup]:
    samples = {name: _numbers(side.get("margins")) for name, side in sides.items()}
    *_, newest = (side for side in sides.values() if side)
    return [
        histogram("Margins of held-out pairs", samples, "margin", "share of pairs; right of 0: in the right order"),
        scatter("Margin against length", {"pairs": _points(newest)}, "tokens that the chosen answer is longer"),
    ]


def _of_answers(side: JsonMap) -> list[Markup]:
    labels = [label if is_number(label) else 0 for label in _listed(side.get("labels"))]
    clouds: dict[str, list[Point]] = {name: [] for name in _LABELS.values()}
    for point, label in zip(_points(side), labels, strict=False):
        if label in _LABELS:
            clouds[_LABELS[int(label)]].append(point)
    samples = {name: [y for _, y in points] for name, points in clouds.items()}
    return [
        histogram("Rewards of held-out answers", samples, "reward", "share of the answers of a label"),
        scatter("Reward against length", clouds, "tokens of the answer"),
    ]


def _points(side: JsonMap) -> list[Point]:
    return list(zip(_numbers(side.get("lengths")), _numbers(side.get("margins")), strict=False))


def _tables(before: JsonMap, after: JsonMap) -> dict[str, Table]:
    titles = {"by_length": ("Accuracy by length", "length", "pairs"), "by_source": ("By source", "source", "rows")}
    made = {
        title: _table(maps(before.get(key))[:_MOST_ROWS], maps(after.get(key))[:_MOST_ROWS], name, unit)
        for key, (title, name, unit) in titles.items()
    }
    return {title: table for title, table in made.items() if len(table.rows) > 1}


def _table(before: Sequence[JsonMap], after: Sequence[JsonMap], name: str, unit: str) -> Table:
    earlier = {str(row.get(name)): row for row in before}
    rows = [
        [
            str(row.get(name)),
            count(row.get(unit)),
            *((or_dash(earlier.get(str(row.get(name)), {}).get("accuracy"), percent),) if before and after else ()),
            or_dash(row.get("accuracy"), percent),
            or_dash(row.get("margin")),
        ]
        for row in after or before
    ]
    shares = ("before", "after") if before and after else ("accuracy",)
    head = [name.capitalize(), unit.capitalize(), *(each.capitalize() for each in shares), "Mean margin"]
    return Table(head, rows, numeric=range(1, len(head)))


def _wrong(row: JsonMap, *, pairs: bool) -> JsonObject:
    texts = {name: _excerpt(row.get(name)) for name in ("prompt", "chosen", "rejected")}
    if pairs:
        answers = [("Chosen", texts["chosen"]), ("Rejected", texts["rejected"])]
    else:
        label = row.get("label")
        named = _LABELS.get(label, "–") if isinstance(label, int) else "–"
        answers = [("Answer", texts["chosen"]), ("Label", clipped(named))]
    margin = or_dash(row.get("margin"))
    return {"origin": str(row.get("origin") or ""), "prompt": texts["prompt"], "answers": answers, "margin": margin}


def _excerpt(value: object) -> ClippedText:
    found = value if isinstance(value, dict) else {}
    left_out = found.get("left_out")
    return clipped(str(found.get("text") or ""), left_out if isinstance(left_out, int) else 0)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _numbers(value: object) -> list[float]:
    """The numbers of a list; none where something else is among them."""
    found = [number_or_none(each) for each in _listed(value)]
    return [each for each in found if each is not None] if None not in found else []
