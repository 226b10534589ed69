"""report.html: one file that opens offline and shows how a run went, built from the run directory alone.

The page loads nothing and runs no script; its content security policy forbids both, and everything that models or
data say is escaped (:mod:`ftcli.run.report.html`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ftcli import __version__
from ftcli.errors import FtcliError
from ftcli.run.atomic import read_json_object, storage_errors, utc_now, write_text
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import read_metrics
from ftcli.run.report import sections
from ftcli.run.report.charts import Series, line_chart
from ftcli.run.report.html import Html, join, tag
from ftcli.run.status import Status, read_status
from ftcli.units import GIB

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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
    notices: list[str] = []
    metrics = _metrics(run, notices)
    recipe = _recipe(run, notices)
    status = read_status(run.status_path)
    manifest = read_json_object(run.manifest_path)
    evaluation = read_json_object(run.eval_path)
    name = str(recipe.get("run", {}).get("name") or run.path.name)
    body = tag(
        "main",
        sections.heading(name, recipe, status, manifest),
        _notices(status, notices),
        sections.key_facts(metrics, evaluation, status),
        _section("Curves", _charts(metrics, manifest)),
        _section("Evaluation", sections.evaluation_table(evaluation)),
        _section("Samples", sections.samples(evaluation.get("samples"))),
        _section("Tokens", sections.token_ledger(read_json_object(run.tokens_path))),
        _section("Settings", sections.settings(recipe)),
        _section("Provenance", sections.provenance(manifest)),
        tag("footer", f"Written by ftcli {__version__} at {utc_now()} from {run.path.name}/."),
    )
    return _page(name, body)


def _page(name: str, body: Html) -> str:
    style = Html(files("ftcli.run.report").joinpath("report.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{name}: ftcli run"),
        tag("style", style),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body), lang='en')}\n"


def _section(title: str, content: Html | None) -> Html:
    return Html("") if content is None else tag("section", tag("h2", title), content)


def _metrics(run: RunDirectory, notices: list[str]) -> list[dict[str, Any]]:
    try:
        return read_metrics(run.metrics_path)
    except (OSError, FtcliError) as error:
        notices.append(f"The curves are missing: {error}")
        return []


def _recipe(run: RunDirectory, notices: list[str]) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(run.recipe_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notices.append(f"The settings are missing: {error}")
        return {}
    return {k: v for k, v in raw.items() if v is not None} if isinstance(raw, dict) else {}


def _notices(status: Status | None, notices: Sequence[str]) -> Html:
    parts = [tag("div", text, class_="notice") for text in notices]
    if status is not None and status.message:
        parts.insert(0, tag("div", status.message, class_=f"notice {status.state}"))
    return join(parts)


def _charts(metrics: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Html | None:
    resumed = [int(p.get("from_step") or 0) for p in manifest.get("processes", ()) if isinstance(p, dict)]
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
    if not figures:
        return None
    note = "A dashed line marks where the run was resumed." if any(resumed) else ""
    return join([tag("div", *figures, class_="charts"), tag("p", note, class_="soft") if note else ""])


def _points(metrics: Sequence[Mapping[str, Any]], key: str, unit: float) -> list[tuple[int, float | None]]:
    rows = sorted((row for row in metrics if key in row), key=lambda row: int(row["step"]))
    values = [(int(row["step"]), _number_or_none(row[key])) for row in rows]
    return [(step, None if value is None else value / unit) for step, value in values]


def _number_or_none(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
