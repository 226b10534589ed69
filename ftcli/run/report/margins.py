"""The report's section on held-out pairs or labelled answers: margins before and after, by length and by source, and
the rows that the model still has wrong. Made from margins.json, which may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from ftcli.plain import JsonMap, is_number, map_in, maps, number_or_none
from ftcli.run.report.plots import Cloud, Point, Sample, histogram, scatter
from ftcli.run.report.samples import ClippedText, clipped
from ftcli.run.report.tables import Table
from ftcli.run.report.text import count, percent
from ftcli.units import number

#: Rows of a table, and of those shown with their texts.
_MOST_ROWS, _MOST_WRONG = 50, 8
_LABELS: Mapping[int, str] = {1: "desirable", -1: "undesirable"}


@dataclass(frozen=True, slots=True)
class WrongExample:
    """A row on the wrong side: where it stands, its prompt, and its answers under the names of their columns."""

    origin: str
    prompt: ClippedText
    answers: Sequence[tuple[str, ClippedText]]
    margin: str


@dataclass(frozen=True, slots=True)
class HeldOutRows:
    """The section.

    Attributes:
        note: Which rows, and when.
        tables: Tables by title.
        columns: Heads of the answers of ``wrong``, and of what stands last.
    """

    title: str
    note: str
    charts: Sequence[Markup]
    tables: Mapping[str, Table]
    wrong: Sequence[WrongExample]
    columns: Sequence[str]


def held_out_rows(margins: JsonMap) -> HeldOutRows | None:
    """The section; None where nothing was measured."""
    before, after = map_in(margins, "before"), map_in(margins, "after")
    newest, step = after or before, margins.get("step")
    if not _numbers(newest.get("margins")):
        return None
    sides = {"before training": before, f"after step {count(step)}" if is_number(step) else "after training": after}
    pairs = newest.get("kind") == "pairs"
    unit = "pairs" if pairs else "labelled answers"
    shown, rows = len(_numbers(newest.get("margins"))), newest.get("rows")
    note = f"{count(rows)} held-out {unit}" + (f", {shown:,} of them drawn" if rows != shown else "")
    return HeldOutRows(
        "Held-out pairs" if pairs else "Held-out answers",
        f"{note}; {count(newest.get('wrong'))} on the wrong side {'before' if newest is before else 'now'}.",
        [chart for chart in (_of_pairs(sides) if pairs else _of_answers(newest)) if chart],
        _tables(before, after),
        [_wrong(row, pairs=pairs) for row in maps(newest.get("worst"))[:_MOST_WRONG]],
        ("Chosen", "Rejected", "Margin") if pairs else ("Answer", "Label", "Reward"),
    )


def _of_pairs(sides: Mapping[str, JsonMap]) -> list[Markup]:
    samples = [Sample(name, _numbers(side.get("margins"))) for name, side in sides.items()]
    *_, newest = (side for side in sides.values() if side)
    return [
        histogram("Margins of held-out pairs", samples, "margin", "share of pairs; right of 0: in the right order"),
        scatter("Margin against length", [Cloud("pairs", _points(newest))], "tokens that the chosen answer is longer"),
    ]


def _of_answers(side: JsonMap) -> list[Markup]:
    labels = [label if is_number(label) else 0 for label in _listed(side.get("labels"))]
    points, samples, clouds = _points(side), [], []
    for label, name in _LABELS.items():
        of_label = [point for point, each in zip(points, labels, strict=False) if each == label]
        samples.append(Sample(name, [y for _, y in of_label]))
        clouds.append(Cloud(name, of_label))
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
            *((_share(earlier.get(str(row.get(name)), {})),) if before and after else ()),
            _share(row),
            _margin(row.get("margin")),
        ]
        for row in after or before
    ]
    shares = ("before", "after") if before and after else ("accuracy",)
    head = [name.capitalize(), unit.capitalize(), *(each.capitalize() for each in shares), "Mean margin"]
    return Table(head, rows, numeric=range(1, len(head)))


def _share(row: JsonMap) -> str:
    value = number_or_none(row.get("accuracy"))
    return "–" if value is None else percent(value)


def _margin(value: object) -> str:
    found = number_or_none(value)
    return "–" if found is None else number(found)


def _wrong(row: JsonMap, *, pairs: bool) -> WrongExample:
    texts = {name: _excerpt(row.get(name)) for name in ("prompt", "chosen", "rejected")}
    if pairs:
        answers = [("Chosen", texts["chosen"]), ("Rejected", texts["rejected"])]
    else:
        label = row.get("label")
        named = _LABELS.get(label, "–") if isinstance(label, int) else "–"
        answers = [("Answer", texts["chosen"]), ("Label", clipped(named))]
    return WrongExample(str(row.get("origin") or ""), texts["prompt"], answers, _margin(row.get("margin")))


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
