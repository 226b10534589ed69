"""report.html: one file that opens offline and shows how a run went, built from the run directory alone.

The page loads nothing and runs no script; its content security policy forbids both, and everything that models or
data say is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ftcli import __version__
from ftcli.errors import FtcliError
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.atomic import read_json_object, storage_errors, utc_now, write_text
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine, read_metrics
from ftcli.run.report import sections
from ftcli.run.report.charts import Series, line_chart
from ftcli.run.report.markup import printable
from ftcli.run.status import Status, read_status
from ftcli.units import GIB

#: What a page may load: nothing but its own style.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, slots=True)
class Chart:
    """A curve of the report: its title and the metrics it draws, by their names on the page; values in ``unit``."""

    title: str
    metrics: Mapping[str, str]
    from_zero: bool = False
    smooth: bool = False
    unit: float = 1.0


CHARTS = (
    Chart("Reward", {"reward": "mean reward", "eval_reward": "held-out"}, smooth=True),
    Chart("Loss", {"loss": "training", "eval_loss": "held-out"}, smooth=True),
    Chart("Held-out token accuracy", {"eval_token_accuracy": "token accuracy"}),
    Chart("Learning rate", {"learning_rate": "learning rate"}, from_zero=True),
    Chart("Gradient norm", {"grad_norm": "gradient norm before clipping"}, from_zero=True, smooth=True),
    Chart("Throughput, tokens/s", {"tokens_per_second": "tokens/s"}, from_zero=True),
    Chart("Peak memory, GiB", {"peak_memory_bytes": "peak memory"}, from_zero=True, unit=float(GIB)),
    Chart("Reward deviation within groups", {"reward_std": "standard deviation"}, from_zero=True, smooth=True),
    Chart("Completion length, tokens", {"completions/mean_length": "mean length"}, from_zero=True, smooth=True),
    Chart("KL to the base model", {"kl": "KL"}, from_zero=True, smooth=True),
    Chart("Entropy of sampled tokens", {"entropy": "entropy"}, from_zero=True, smooth=True),
)


def write_report(run: RunDirectory) -> Path:
    """Build report.html from the files of the run; missing or damaged ones are left out and named on the page.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(run.report_path):
        write_text(run.report_path, render_report(run))
    return run.report_path


def render_report(run: RunDirectory) -> str:
    """The page as text."""
    troubles: list[str] = []
    metrics = _metrics(run, troubles)
    recipe = _recipe(run, troubles)
    status = read_status(run.status_path)
    manifest = read_json_object(run.manifest_path)
    evaluation = read_json_object(run.eval_path)
    resumed = [int(p.get("from_step") or 0) for p in manifest.get("processes", ()) if isinstance(p, dict)]
    return template("page.html.jinja").render(
        policy=POLICY,
        style=style(),
        name=str(recipe.get("run", {}).get("name") or run.path.name),
        state="unknown" if status is None else status.state,
        summary=sections.summary(recipe, manifest),
        notices=_notices(status, troubles),
        facts=sections.key_facts(metrics, evaluation, status),
        charts=_charts(metrics, resumed),
        resumed=any(resumed),
        scores=sections.scores(evaluation),
        samples=sections.samples(evaluation.get("samples")),
        tokens=sections.tokens(read_json_object(run.tokens_path)),
        settings=sections.settings(recipe),
        provenance=sections.provenance(manifest),
        version=__version__,
        now=utc_now(),
        folder=run.path.name,
    )


def style() -> Markup:
    """The style sheet that the pages share."""
    return Markup(files(__package__).joinpath("report.css").read_text(encoding="utf-8"))  # noqa: S704 our own file


def template(name: str) -> Template:
    """A page's template. It escapes every value; what cannot be printed is replaced before."""
    return Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        finalize=printable,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    ).get_template(name)


def _metrics(run: RunDirectory, notices: list[str]) -> list[MetricsLine]:
    try:
        return read_metrics(run.metrics_path)
    except (OSError, FtcliError) as error:
        notices.append(f"The curves are missing: {error}")
        return []


def _recipe(run: RunDirectory, notices: list[str]) -> JsonObject:
    try:
        raw = yaml.safe_load(run.recipe_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notices.append(f"The settings are missing: {error}")
        return {}
    return {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}


def _notices(status: Status | None, troubles: Sequence[str]) -> list[tuple[str, str]]:
    """Texts with their class: how the run ended, where that needs saying, and what could not be read."""
    ended = [(status.message, str(status.state))] if status is not None and status.message else []
    return [*ended, *((text, "") for text in troubles)]


def _charts(metrics: Sequence[JsonMap], resumed: Sequence[int]) -> list[Markup]:
    steps = [int(row["step"]) for row in metrics]
    limits = (min(steps), max(steps)) if steps else None
    figures = []
    for chart in CHARTS:
        series = [
            Series(label, _points(metrics, key, chart.unit), chart.smooth) for key, label in chart.metrics.items()
        ]
        if all(len(one.finite) < 2 for one in series):
            continue  # one point is no curve; its value stands among the figures or in the evaluation
        drawn = line_chart(chart.title, series, from_zero=chart.from_zero, marks=filter(None, resumed), steps=limits)
        figures += [drawn] if drawn is not None else []
    return figures


def _points(metrics: Sequence[JsonMap], key: str, unit: float) -> list[tuple[int, float | None]]:
    rows = sorted((row for row in metrics if key in row), key=lambda row: int(row["step"]))
    values = [(int(row["step"]), _number_or_none(row[key])) for row in rows]
    return [(step, None if value is None else value / unit) for step, value in values]


def _number_or_none(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
