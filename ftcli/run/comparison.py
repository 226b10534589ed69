"""Several runs side by side: what they came to, how they got there, and where their recipes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.grid import PLACES
from ftcli.plain import JsonObject, plain_fields
from ftcli.run.atomic import read_text
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine, read_metrics
from ftcli.run.recipe_changes import settings_of
from ftcli.run.summary import RunSummary, summarise

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
        """What JSON says of it."""
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
