"""`ftcli runs` and `ftcli compare`: what runs came to, listed and side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.cli.files import require_page, write_page
from ftcli.cli.render import clean, table
from ftcli.errors import Finding, FtcliError, Origin, Severity
from ftcli.paths import OPEN_IT, exists, expanded, is_folder
from ftcli.plain import FLATTENED, LEFT_OUT, JsonObject, plain_fields
from ftcli.reporting import Reporter, Session
from ftcli.units import number, score

if TYPE_CHECKING:
    from ftcli.run.report.page import Comparison, Points
    from ftcli.run.summary import RunSummary

_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 32


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """The answer of `ftcli runs`, the newest run last. ``unread`` are folders that could not be read."""

    folder: str
    runs: Sequence[RunSummary]
    unread: Sequence[str] = field(default=(), metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """The answer of `ftcli compare`: ``rows`` are a label and a text for each run, ``html`` is the page."""

    comparison: Comparison = field(metadata=FLATTENED)
    rows: Sequence[tuple[str, Sequence[str]]]
    html: str | None = field(default=None, metadata=LEFT_OUT)

    def as_dict(self) -> JsonObject:
        return {**plain_fields(self), "rows": [[label, *texts] for label, texts in self.rows]}


def _require_open(folder: str, reason: str | None) -> None:
    """Raises FtcliError FT154 (exit 2) for what is no folder, and for one that cannot be read, with the reason."""
    problem = None
    if reason is not None:
        problem, help = f"{folder} cannot be read: {reason}", OPEN_IT
    elif not is_folder(expanded(folder)):
        problem = f"{folder} is not a directory"
        help = "name the folder that holds your runs; `ftcli train` writes into runs/ unless told otherwise"
    if problem is not None:
        raise FtcliError.single("FT154", problem, origin=Origin("command line"), help=help)


def _runs_named(names: Sequence[str], reporter: Reporter) -> list[Path]:
    """The runs that are named, or lie in folders that are. Raises FtcliError FT154 where there are not two."""
    from ftcli.cli.names import run_meant
    from ftcli.run.summary import find_runs

    found: list[Path] = []
    for name in names:
        folder = expanded(name)
        closed: dict[Path, str] = {}
        runs = list(find_runs(folder, 1, closed.__setitem__))
        found += runs
        for path, reason in closed.items():
            message = f"{path} cannot be read: {reason}; it is left out"
            reporter.finding(Finding("FT154", message, Origin("command line"), OPEN_IT, "warning"))
        if not runs and not closed:
            problem = "is no run directory, and holds none" if is_folder(folder) else "is not a directory"
            severity: Severity = "note" if exists(folder) else "warning"
            message = f"{name} {problem}: it is left out"
            reporter.finding(Finding("FT154", message, Origin("command line"), run_meant(folder), severity))
    if len(found) > 1:
        return found
    message = (
        f"there is nothing to compare with {found[0]}: it is the only run" if found else "there is no run among them"
    )
    help = "name two runs at least, as in runs/first runs/second, or a folder that holds them"
    raise FtcliError.single("FT154", message, origin=Origin("command line"), help=help)


def _tell_damage(runs: Sequence[RunSummary], reporter: Reporter) -> None:
    help = "restore the file; what is sound is shown"
    for run in runs:
        if run.damage:
            message = f"{run.path} is damaged: {'; '.join(run.damage)}"
            reporter.finding(Finding("FT727", message, help=help, severity="warning"))


def _runs_text(result: FoundRuns) -> str:
    if not result.runs:
        return f"no runs below {result.folder}" + (", as far as it can be read" if result.unread else "")
    records = []
    for run in result.runs:
        scores = ", ".join(f"{name} {score(value)}" for name, value in run.tasks.items())
        held_out = "-" if run.eval_loss is None else number(run.eval_loss)
        records.append(
            {
                "run": str(run.path),
                "state": f"{run.state}, damaged" if run.damage else run.state,
                "step": run.step,
                "loss": run.loss if run.loss is not None else run.reward,
                "held-out": f"{held_out} ({scores})" if scores else held_out,
                "began": (run.started or "-").replace("T", " ").removesuffix("Z"),
            }
        )
    return "\n".join(table(records))


def _comparison_text(result: ComparedRuns) -> str:
    comparison, names = result.comparison, result.comparison.names
    lines = _columns([["", *names], *([label, *texts] for label, texts in result.rows)])
    for metric, curves in comparison.curves.items():
        shown = _columns([["", name, _bars(curve)] for name, curve in zip(names, curves, strict=True)])
        lines += ["", metric, *shown]
    lines += ["", "settings that differ" if comparison.differences else "the recipes are the same"]
    if comparison.differences:
        rows = [[key, *(value or "-" for value in values)] for key, values in comparison.differences.items()]
        lines += _columns([["", *names], *rows])
    return "\n".join(lines)


def _columns(rows: list[list[str]]) -> list[str]:
    rows = [[clean(text) for text in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _bars(points: Points) -> str:
    """A curve as a line of bars, from the first to the last value, which stand beside it."""
    values = [value for _, value in points if value is not None]
    if not values:
        return "-"
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    count = min(_BARS_SHOWN, len(values))
    shown = [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]
    bars = "".join(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)] for value in shown)
    return f"{number(values[0])} {bars} {number(values[-1])}"


@options.command("runs", _runs_text, takes=("json", "quiet", "debug"))
def runs(
    session: Session,
    folder: Annotated[str, typer.Argument(metavar="[DIR]", help="Where to look.")] = "runs",
) -> FoundRuns:
    """List runs, the newest last.

    For each run below a folder: its state, step, losses, held-out results and when it began.

    \b
    Examples:
      ftcli runs
      ftcli runs experiments --json
    """

    from ftcli.run.summary import find_runs, summarise

    closed: dict[Path, str] = {}
    found = [summarise(path) for path in find_runs(expanded(folder), closed=closed.__setitem__)]
    _require_open(folder, closed.get(expanded(folder)))
    _tell_damage(found, session.reporter)
    for path, reason in closed.items():
        message = f"{path} cannot be read: {reason}; runs in it are not listed"
        session.reporter.finding(Finding("FT154", message, help=OPEN_IT, severity="warning"))
    unread = [str(path) for path in closed]
    return FoundRuns(folder, sorted(found, key=lambda run: run.started or ""), unread)


# What `--html /dev/stdout` names is the command's own.
@options.command("compare", _comparison_text, takes=("json", "quiet", "debug"), owns_stdout=True)
def compare(
    session: Session,
    directories: Annotated[
        list[str], typer.Argument(metavar="RUN RUN ...", help="Run directories.", autocompletion=names.run_folders)
    ],
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Also write a page that opens offline.")
    ] = None,
) -> ComparedRuns:
    """Compare runs.

    Results, curves and the settings that differ, side by side. A folder of runs, as of a sweep, means those in it;
    what is no run is left out.

    \b
    Examples:
      ftcli compare runs/first runs/second
      ftcli compare runs/* --html comparison.html
    """

    from ftcli.run.report.page import compare as side_by_side
    from ftcli.run.report.page import render_comparison, result_rows

    page = options.named(html, "--html")
    if page is not None:
        require_page(page)
    comparison = side_by_side(_runs_named(directories, session.reporter))
    _tell_damage(comparison.runs, session.reporter)
    result = ComparedRuns(comparison, result_rows(comparison), html)
    if page is not None:
        write_page(render_comparison(comparison), page)
        session.reporter.info(f"written: {html}")
    return result
