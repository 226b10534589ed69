"""report.html and the page of `ftcli compare`: files that open offline, built from the run directories alone.

A page loads nothing and runs no script; its content security policy forbids both, and everything that models or data
say is escaped. While a run goes on its page is rewritten now and then, at little cost and never at the cost of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ftcli import __version__
from ftcli.config.grid import PLACES
from ftcli.errors import FtcliError
from ftcli.plain import JsonObject, is_number, map_in, maps, plain_fields
from ftcli.run.atomic import read_json_object, read_text, storage_errors, utc_now, write_named, write_text
from ftcli.run.completions import Completions
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import read_metrics
from ftcli.run.recipe_changes import recipe_in, settings_of
from ftcli.run.report import curves, margins, samples, tables
from ftcli.run.report.charts import ChartLook, Series, count, line_chart, or_dash, printable
from ftcli.run.status import Status, read_status
from ftcli.run.summary import RunSummary, damage_of, summarise
from ftcli.tables import methods
from ftcli.units import duration, gib, percent, score

#: What a page may load: nothing but its own style.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
#: How often the page of a run that is going on loads itself again.
REFRESH_SECONDS = 5


@dataclass(frozen=True, slots=True)
class LiveProgress:
    """Progress of a running run: ``step`` of ``total``, and how long the rest will take, where that is known."""

    step: int
    total: int
    seconds_left: float | None = None

    @property
    def text(self) -> str:
        """``step 45 of 100, about 3m05s left``."""
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        return f"step {self.step:,} of {self.total:,}{left}"


def write_report(run: RunDirectory, live: LiveProgress | None = None) -> None:
    """Build report.html from the files of the run; missing or damaged ones are left out and named on the page.
    ``live``: the run goes on, and the page reloads itself. Raises FtcliError FT723 or FT724.
    """
    with storage_errors(run.report_path):
        write_text(run.report_path, render_report(run, live))


def render_report(run: RunDirectory, live: LiveProgress | None = None) -> str:
    read = read_metrics(run.metrics_path)
    metrics = read.lines
    recipe = {key: value for key, value in recipe_in(run.recipe_path).items() if value is not None}
    status = read_status(run.status_path)
    manifest = read_json_object(run.manifest_path)
    evaluation = read_json_object(run.eval_path)
    every = tables.settings_by_section(recipe)
    began = [process.get("from_step") for process in maps(manifest.get("processes"))]
    method = methods.TABLE.get(str(map_in(recipe, "train").get("method")))
    resumed = [int(step) for step in began if is_number(step) and step > 0]
    main_charts, lesser_charts = curves.curves(metrics, evaluation, resumed, method)
    return page_template("page.html.jinja").render(
        policy=POLICY,
        style=style(),
        refresh=REFRESH_SECONDS,
        live=live,
        name=str(map_in(recipe, "run").get("name") or run.path.name),
        state="unknown" if status is None else status.state,
        summary=tables.summary_line(recipe, manifest),
        notices=_notices(status, damage_of(run, read)),
        facts=tables.key_facts(metrics, evaluation, status),
        main_charts=main_charts,
        lesser_charts=lesser_charts,
        resumed=any(resumed),
        scores=tables.score_rows(evaluation, method),
        held_out=margins.held_out_rows(read_json_object(run.margins_path)),
        samples=samples.samples(evaluation),
        batches=samples.sampled(Completions(run.completions_dir)),
        tokens=tables.tokens(read_json_object(run.tokens_path)),
        changed=tables.changed(every),
        settings=every,
        provenance=tables.provenance(manifest),
        version=__version__,
        now=utc_now(),
        folder=run.path.name,
    )


def style() -> Markup:
    """The style sheet that the pages share."""
    return Markup(files(__package__).joinpath("report.css").read_text(encoding="utf-8"))  # noqa: S704 our own file


def page_template(name: str) -> Template:
    """A page's template. It escapes every value; what cannot be printed is replaced before."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    """Made once: a page is written again and again while a run goes on, and compiling it takes longer than that."""
    return Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        finalize=printable,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )


def _notices(status: Status | None, troubles: Sequence[str]) -> list[tuple[str, str]]:
    """Texts with their class: how the run ended, where that needs saying, and what could not be read."""
    ended = [(status.message, str(status.state))] if status is not None and status.message else []
    early = None if status is None or status.trained is None else status.trained.summary.stopped_early
    if early:
        ended.append((f"Stopped early: {early}.", ""))
    return [*ended, *((f"What is damaged is left out: {text}.", "") for text in troubles)]


#: At most this often, and at most this share of the time.
_SECONDS_BETWEEN = 4.0
_SHARE = 0.02
#: What drawing strange data can raise; the picture waits then, the run does not.
_UNDRAWABLE = (FtcliError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


@dataclass(slots=True)
class LiveReport:
    """Rewrites report.html while its run goes on."""

    run: RunDirectory
    clock: Callable[[], float] = time.monotonic
    _due: float = 0.0

    def update(self, live: LiveProgress, *, urgent: bool = False) -> bool:
        """Writes the page when it is due, or when ``urgent``; says whether it did.

        A page that cannot be written or drawn is left as it was: the one at the run's end tells why.
        """
        began = self.clock()
        if began < self._due and not urgent:
            return False
        try:
            write_report(self.run, live)
        except _UNDRAWABLE:
            self._due = began + 10 * _SECONDS_BETWEEN
            return False
        now = self.clock()
        self._due = now + max(_SECONDS_BETWEEN, (now - began) / _SHARE)
        return True


#: Metrics with a curve, by their keys, with a title.
CURVES: Mapping[str, str] = {"loss": "Training loss", "eval_loss": "Held-out loss", "reward": "Reward"}

#: A curve's points: step and value.
Points = list[tuple[int, float | None]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs in the order asked for, with short ``names``; ``curves``: the points of each run for each metric of
    :data:`CURVES` that one has; ``differences``: the recipe keys in which they differ, with each one's value (None: it
    has none).
    """

    names: tuple[str, ...]
    runs: tuple[RunSummary, ...]
    curves: Mapping[str, tuple[Points, ...]]
    differences: Mapping[str, Sequence[str | None]]

    def as_dict(self) -> JsonObject:
        return {
            "runs": [{"name": name, **plain_fields(run)} for name, run in zip(self.names, self.runs, strict=True)],
            "curves": {metric: dict(zip(self.names, points, strict=True)) for metric, points in self.curves.items()},
            "differences": [
                {"key": key, "values": dict(zip(self.names, values, strict=True))}
                for key, values in self.differences.items()
            ],
        }


def compare(paths: Sequence[Path]) -> Comparison:
    """The runs in ``paths`` side by side.

    A run whose recipe cannot be read differs in no setting; its summary says so.
    """
    lines = [read_metrics(RunDirectory(path).metrics_path).lines for path in paths]
    curves = {
        metric: tuple([(line["step"], line[metric]) for line in of_run if metric in line] for of_run in lines)
        for metric in CURVES
    }
    return Comparison(
        names=_names(paths),
        runs=tuple(summarise(path) for path in paths),
        curves={metric: points for metric, points in curves.items() if any(points)},
        differences=_differences([_settings(path) for path in paths]),
    )


def _settings(path: Path) -> dict[str, str]:
    """The run's settings; none where its recipe cannot be read."""
    try:
        return settings_of(read_text(RunDirectory(path).recipe_path))
    except (OSError, ValueError):
        return {}


def _differences(recipes: Sequence[Mapping[str, str]]) -> dict[str, list[str | None]]:
    known = [recipe for recipe in recipes if recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe if key not in PLACES)  # no difference of experiments
    differ = (key for key in keys if len({recipe.get(key) for recipe in known}) > 1)
    return {key: [recipe.get(key) for recipe in recipes] for key in differ}


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The ends of the paths, as many parts of each as tell them apart; the same path twice is numbered."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = tuple("/".join(each[-length:]) for each in parts)
        if len(set(names)) == len(names):
            return names
    return tuple(f"{each[-1]} #{number}" for number, each in enumerate(parts, 1))


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Writes the page. Raises FtcliError FT723 or FT724 when it cannot be written."""
    with storage_errors(path):
        write_named(path, render_comparison(comparison).encode("utf-8"))


def render_comparison(comparison: Comparison) -> str:
    return page_template("compared.html.jinja").render(
        policy=POLICY,
        style=style(),
        names=comparison.names,
        states=[run.state for run in comparison.runs],
        charts=_charts(comparison),
        results=result_rows(comparison),
        differences=[(key, [value or "–" for value in values]) for key, values in comparison.differences.items()],
        version=__version__,
        now=utc_now(),
    )


def result_rows(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Results of the runs: a label, and a text for each run; rows that no run has are left out."""
    runs = comparison.runs
    rows = [
        ("state", [run.state for run in runs]),
        ("steps", [count(run.step) for run in runs]),
        ("training loss", [or_dash(run.loss) for run in runs]),
        ("reward", [or_dash(run.reward) for run in runs]),
        ("held-out loss", [or_dash(run.eval_loss) for run in runs]),
        ("held-out, in the right order", [or_dash(run.preferred, percent) for run in runs]),
        ("held-out token accuracy", [or_dash(run.token_accuracy, percent) for run in runs]),
        *((name, [or_dash(run.tasks.get(name), score) for run in runs]) for name in _tasks(runs)),
        ("tokens", [count(run.tokens) for run in runs]),
        ("tokens/s, median", [or_dash(run.tokens_per_second) for run in runs]),
        ("peak memory, GiB", [or_dash(run.peak_memory_bytes, gib) for run in runs]),
        ("seconds", [or_dash(run.seconds) for run in runs]),
    ]
    return [(label, texts) for label, texts in rows if any(text != "–" for text in texts)]


def _charts(comparison: Comparison) -> list[Markup]:
    charts = []
    for metric, of_runs in comparison.curves.items():
        series = [Series(name, points) for name, points in zip(comparison.names, of_runs, strict=True)]
        chart = line_chart(CURVES[metric], series, ChartLook(log=metric.endswith("loss")))
        charts += [chart] if chart else []
    return charts


def _tasks(runs: Sequence[RunSummary]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.tasks))
