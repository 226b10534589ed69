"""`ftcli compare`: several runs side by side, their curves, results and recipe differences; and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ftcli import __version__
from ftcli.config.grid import PLACES
from ftcli.plain import JsonObject, plain_fields
from ftcli.run.atomic import read_text, storage_errors, utc_now, write_named
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine, read_metrics
from ftcli.run.recipe_changes import settings_of
from ftcli.run.report.charts import ChartLook, Series, line_chart
from ftcli.run.report.page import POLICY, page_template, style
from ftcli.run.summary import RunSummary, summarise
from ftcli.units import gib, number

#: Metrics with a curve, by their keys, with a title.
CURVES: Mapping[str, str] = {"loss": "Training loss", "eval_loss": "Held-out loss", "reward": "Reward"}

#: A curve's points: step and value.
Points = list[tuple[int, float | None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One recipe key with its value in each run, as people write it; None where a run's recipe does not have it."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs in the order asked for.

    Attributes:
        names: A short name for each, all different.
        runs: What each came to.
        curves: For each metric of :data:`CURVES` that some run has, the points of each run.
        differences: Recipe keys in which they differ.
    """

    names: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    curves: Mapping[str, tuple[Points, ...]]
    differences: tuple[Difference, ...]

    def as_dict(self) -> JsonObject:
        """The comparison for JSON."""
        return {
            "runs": [{"name": name, **plain_fields(run)} for name, run in zip(self.names, self.runs, strict=True)],
            "curves": {metric: dict(zip(self.names, points, strict=True)) for metric, points in self.curves.items()},
            "differences": [
                {"key": each.key, "values": dict(zip(self.names, each.values, strict=True))}
                for each in self.differences
            ],
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """The runs in ``paths`` side by side.

    A run whose recipe cannot be read differs in no setting; its summary says so.
    """
    lines = [read_metrics(RunDirectory(path).metrics_path).lines for path in paths]
    curves = {metric: tuple(_points(of_run, metric) for of_run in lines) for metric in CURVES}
    return Comparison(
        names=_names(paths),
        runs=tuple(summarise(path) for path in paths),
        curves={metric: points for metric, points in curves.items() if any(points)},
        differences=_differences([_settings(path) for path in paths]),
    )


def _points(lines: Sequence[MetricsLine], metric: str) -> Points:
    return [(line["step"], line[metric]) for line in lines if metric in line]


def _settings(path: Path) -> dict[str, str]:
    """The run's settings; none where its recipe cannot be read."""
    try:
        return settings_of(read_text(RunDirectory(path).recipe_path))
    except (OSError, ValueError):
        return {}


def _differences(recipes: Sequence[Mapping[str, str]]) -> tuple[Difference, ...]:
    known = [recipe for recipe in recipes if recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe if key not in PLACES)  # no difference of experiments
    differ = (key for key in keys if len({recipe.get(key) for recipe in known}) > 1)
    return tuple(Difference(key, tuple(recipe.get(key) for recipe in recipes)) for key in differ)


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The ends of the paths, as many parts of each as tell them apart; the same path twice is numbered."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = tuple("/".join(each[-count:]) for each in parts)
        if len(set(names)) == len(names):
            return names
    return tuple(f"{each[-1]} #{number}" for number, each in enumerate(parts, 1))


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
    """Results of the runs: a label, and a text for each run; rows that no run has are left out."""
    runs = comparison.runs
    rows = [
        ("state", [run.state for run in runs]),
        ("steps", [_count(run.step) for run in runs]),
        ("training loss", [_shown(run.loss) for run in runs]),
        ("reward", [_shown(run.reward) for run in runs]),
        ("held-out loss", [_shown(run.eval_loss) for run in runs]),
        ("held-out, in the right order", [_share(run.preferred) for run in runs]),
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
