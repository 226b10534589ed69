"""The page of `ftcli compare`: one file that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from ftcli import __version__
from ftcli.run.atomic import storage_errors, utc_now, write_named
from ftcli.run.comparison import CURVES, Comparison
from ftcli.run.report.charts import ChartLook, Series, line_chart
from ftcli.run.report.page import POLICY, page_template, style
from ftcli.run.summary import RunSummary
from ftcli.units import gib, number


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the page.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(path):
        write_named(path, render_comparison(comparison).encode("utf-8"))


def render_comparison(comparison: Comparison) -> str:
    """The page as text."""
    return page_template("compared.html.jinja").render(
        policy=POLICY,
        style=style(),
        names=comparison.names,
        states=[run.state for run in comparison.runs],
        charts=_charts(comparison),
        results=result_rows(comparison),
        differences=[(each.key, [value or "–" for value in each.values]) for each in comparison.differences],
        version=__version__,
        now=utc_now(),
    )


def result_rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """What the runs came to: a label, and a text for each run; rows that no run has are left out."""
    runs = comparison.runs
    rows = [
        ("state", [run.state for run in runs]),
        ("steps", [_count(run.step) for run in runs]),
        ("training loss", [_shown(run.loss) for run in runs]),
        ("reward", [_shown(run.reward) for run in runs]),
        ("held-out loss", [_shown(run.eval_loss) for run in runs]),
        ("held-out token accuracy", [_share(run.token_accuracy) for run in runs]),
        *((name, [_share(run.tasks.get(name)) for run in runs]) for name in _tasks(runs)),
        ("tokens", [_count(run.tokens) for run in runs]),
        ("tokens/s, median", [_shown(run.tokens_per_second) for run in runs]),
        ("peak memory, GiB", [_gib(run.peak_memory_bytes) for run in runs]),
        ("seconds", [_shown(run.seconds) for run in runs]),
    ]
    return [(label, texts) for label, texts in rows if any(text != "–" for text in texts)]


def _charts(comparison: Comparison) -> list[Markup]:
    charts = []
    for metric, curves in comparison.curves.items():
        series = [Series(name, points) for name, points in zip(comparison.names, curves, strict=True)]
        chart = line_chart(CURVES[metric], series, ChartLook(log=metric.endswith("loss")))
        charts += [chart] if chart else []
    return charts


def _tasks(runs: Sequence[RunSummary]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.tasks))


def _shown(value: float | None) -> str:
    return "–" if value is None else number(value)


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _gib(value: int | None) -> str:
    return "–" if value is None else gib(value)
