"""Several runs side by side: what they came to, how they got there, and where their recipes differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.grid import PLACES
from ftcli.plain import JsonObject, plain_fields
from ftcli.run.changes import settings_of
from ftcli.run.history import RunSummary, metrics_of, summarise
from ftcli.run.layout import RunDirectory, unreadable_file
from ftcli.run.metrics import MetricsLine

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

    Raises:
        FtcliError: FT727 where a run's recipe cannot be read.
    """
    lines = [metrics_of(RunDirectory(path)) for path in paths]
    curves = {metric: tuple(_points(of_run, metric) for of_run in lines) for metric in CURVES}
    return Comparison(
        names=_names(paths),
        runs=tuple(summarise(path) for path in paths),
        curves={metric: points for metric, points in curves.items() if any(points)},
        differences=_differences([_settings(path) for path in paths]),
    )


def _points(lines: Sequence[MetricsLine], metric: str) -> Points:
    return [(int(line["step"]), line[metric]) for line in lines if metric in line]


def _settings(path: Path) -> dict[str, str]:
    recipe = RunDirectory(path).recipe_path
    try:
        return settings_of(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable_file(recipe, error) from error


def _differences(recipes: Sequence[Mapping[str, str]]) -> tuple[Difference, ...]:
    keys = dict.fromkeys(
        key for recipe in recipes for key in recipe if key not in PLACES
    )  # no difference between experiments
    rows = (Difference(key, tuple(recipe.get(key) for recipe in recipes)) for key in keys)
    return tuple(row for row in rows if len(set(row.values)) > 1)


def _names(paths: Sequence[Path]) -> tuple[str, ...]:
    """The ends of the paths, as many parts of each as tell them apart; the same path twice is numbered."""
    parts = [path.absolute().parts for path in paths]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = tuple("/".join(each[-count:]) for each in parts)
        if len(set(names)) == len(names):
            return names
    return tuple(f"{each[-1]} #{number}" for number, each in enumerate(parts, 1))
