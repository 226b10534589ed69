"""report.html: one file that opens offline and shows how a run goes or went, built from the run directory alone.

The page loads nothing and runs no script; its content security policy forbids both, and everything that models or
data say is escaped.

While a run goes on the page is rewritten now and then, at little cost and never at the cost of the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from ftcli import __version__
from ftcli.errors import FtcliError
from ftcli.plain import JsonObject, is_number, map_in, maps
from ftcli.run.atomic import read_json_object, read_text, storage_errors, utc_now, write_text
from ftcli.run.completions import Completions
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import read_metrics
from ftcli.run.recipe_changes import map_of
from ftcli.run.report import curves, margins, samples, tables
from ftcli.run.report.text import printable
from ftcli.run.status import Status, read_status
from ftcli.run.summary import damage_of
from ftcli.tables import methods
from ftcli.units import duration

#: What a page may load: nothing but its own style.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
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

    Args:
        live: The run is going on: the page says where it is, and loads itself again and again.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(run.report_path):
        write_text(run.report_path, render_report(run, live))


def render_report(run: RunDirectory, live: LiveProgress | None = None) -> str:
    """The page as text."""
    read = read_metrics(run.metrics_path)
    metrics, recipe = read.lines, _recipe(run)
    status = read_status(run.status_path)
    manifest = read_json_object(run.manifest_path)
    evaluation = read_json_object(run.eval_path)
    every = tables.settings_by_section(recipe)
    began = [process.get("from_step") for process in maps(manifest.get("processes"))]
    method = methods.TABLE.get(str(map_in(recipe, "train").get("method")))
    resumed = [int(step) for step in began if is_number(step) and step > 0]
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
        charts=curves.curves(metrics, evaluation, resumed, method),
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


def _recipe(run: RunDirectory) -> JsonObject:
    try:
        raw = map_of(read_text(run.recipe_path))
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in raw.items() if v is not None}


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
