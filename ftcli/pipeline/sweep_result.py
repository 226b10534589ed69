"""The result of a sweep: its runs side by side, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftcli.config.grid import Combination
from ftcli.config.overrides import Settings
from ftcli.plain import FLATTENED
from ftcli.run.directory import is_run_directory
from ftcli.run.report.comparison import Comparison, compare, write_comparison
from ftcli.run.summary import RunSummary

#: The page of the comparison, in the sweep's folder.
PAGE = "comparison.html"


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run of a sweep: its exit status (negative: a signal), and the reason if it failed."""

    combination: Combination
    path: Path
    exit_code: int
    reason: str | None
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SweptRun:
    """A run of a sweep with its results; without a run directory there are none."""

    summary: RunSummary | None = field(metadata=FLATTENED)
    name: str
    path: Path
    settings: Settings
    exit_code: int
    reason: str | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class BestRun:
    """The best run, and the measure by which it is."""

    name: str
    path: Path
    settings: Settings
    metric: str
    value: float | None


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The answer of `ftcli sweep`. ``remarks`` say what to keep in mind of the best, or why there is none."""

    sweep: Path
    runs: Sequence[SweptRun]
    best: BestRun | None
    remarks: Sequence[str]
    html: Path | None
    comparison: Comparison | None


@dataclass(frozen=True, slots=True)
class _Measure:
    """The measure that runs are compared by: its name, its value of a run (None: not measured), and whether more is
    better.
    """

    name: str
    value: Callable[[RunSummary], float | None]
    more_is_better: bool


def _mean_score(run: RunSummary) -> float | None:
    return sum(run.tasks.values()) / len(run.tasks) if run.tasks else None


#: The first that all completed runs have decides. Losses of pairs are no measure: they depend on beta and on the loss.
_MEASURES = (
    _Measure("share of held-out pairs in the right order", lambda run: run.preferred, more_is_better=True),
    _Measure("held-out loss", lambda run: run.eval_loss, more_is_better=False),
    _Measure("mean score of the tasks", _mean_score, more_is_better=True),
    _Measure("reward in training", lambda run: run.reward, more_is_better=True),
)


def sweep_result(folder: Path, outcomes: Sequence[RunOutcome]) -> SweepResult:
    """The runs with their results, the best one, and the comparison, which is also written as a page.

    Raises FtcliError FT723 or FT724 where the page cannot be written, FT727 where a run's recipe is not readable.
    """
    there = [outcome for outcome in outcomes if is_run_directory(outcome.path)]
    comparison = compare([outcome.path for outcome in there]) if there else None
    summaries = {run.path: run for run in comparison.runs} if comparison is not None else {}
    page = folder / PAGE
    if comparison is not None:
        write_comparison(comparison, page)
    best, remarks = _best([outcome for outcome in outcomes if outcome.exit_code == 0], summaries)
    runs = [_row(outcome, summaries.get(outcome.path)) for outcome in outcomes]
    return SweepResult(folder, runs, best, remarks, page if comparison is not None else None, comparison)


def exit_code_of_sweep(result: SweepResult) -> int:
    """0 where every run is complete, else the status of the first that is not; 1 for one that was killed."""
    codes = [run.exit_code for run in result.runs if run.exit_code != 0]
    return next((code if code > 0 else 1 for code in codes), 0)


def _row(outcome: RunOutcome, summary: RunSummary | None) -> SweptRun:
    return SweptRun(
        summary,
        outcome.combination.name,
        outcome.path,
        outcome.combination.settings,
        outcome.exit_code,
        outcome.reason,
        outcome.skipped,
    )


def _best(complete: Sequence[RunOutcome], summaries: Mapping[Path, RunSummary]) -> tuple[BestRun | None, list[str]]:
    """The best, and remarks: what to keep in mind, or why there is none."""
    if not complete:
        return None, ["no run is complete, so none is the best"]
    values: dict[Path, float | None] = {}
    for measure in _MEASURES:
        values = {outcome.path: measure.value(summaries[outcome.path]) for outcome in complete}
        if all(value is not None and math.isfinite(value) for value in values.values()):
            break
    else:
        why = "not all runs have held-out results, so none is named the best: name held-out rows in data.eval"
        return None, [why]
    sign = -1 if measure.more_is_better else 1
    best = min(complete, key=lambda outcome: sign * (values[outcome.path] or 0.0))
    combination = best.combination
    named = BestRun(combination.name, best.path, combination.settings, measure.name, values[best.path])
    equal = sum(value == values[best.path] for value in values.values()) - 1
    ties = [f"{equal} more came to the same {measure.name}: the first is named"] if equal else []
    return named, [*ties, *([] if equal else _at_an_edge(best, complete)), *_other_tokens(complete, summaries)]


def _at_an_edge(best: RunOutcome, complete: Sequence[RunOutcome]) -> list[str]:
    """The best of a row of numbers says little where the row ends with it."""
    remarks = []
    for key, value in best.combination.settings.items():
        tried = [outcome.combination.settings[key] for outcome in complete]
        numbers = {each for each in tried if isinstance(each, int | float) and not isinstance(each, bool)}
        if len(numbers) >= 3 and value in (min(numbers), max(numbers)):
            side = "largest" if value == max(numbers) else "smallest"
            remarks.append(f"the best {key} is the {side} that was tried: the optimum may lie beyond it")
    return remarks


def _other_tokens(complete: Sequence[RunOutcome], summaries: Mapping[Path, RunSummary]) -> list[str]:
    counts = {summaries[outcome.path].eval_tokens for outcome in complete} - {None}
    if len(counts) < 2:
        return []
    return ["the runs were measured on different held-out tokens: their losses are not quite comparable"]
