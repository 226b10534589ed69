"""Summary of a run, read from its directory alone: for lists of runs and for comparing them."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.errors import first_line
from ftcli.paths import why_closed
from ftcli.plain import JsonMap, is_number, map_in, number_or_none, numbers_of
from ftcli.run.atomic import json_object_in, read_json_object, read_text
from ftcli.run.directory import RunDirectory, is_locked, is_run_directory
from ftcli.run.metrics import MetricsLine, ReadMetrics, read_metrics
from ftcli.run.recipe_changes import map_of
from ftcli.run.status import read_status, status_damage

#: Folders of a run are not searched for further runs, and neither are links: they may lead in circles.
_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

    Attributes:
        state: As in status.json; ``killed`` where that says running and no process is known to hold the run.
        step: The last step with a line of metrics; None before the first.
        loss: Of that line, in nats per token.
        eval_loss: Held-out loss of the result, or the last one during training.
        tokens_per_second: Median over the lines of metrics.
        started: When its last process began, ISO 8601 in UTC.
        eval_tokens: Tokens that the result's held-out loss is the mean of.
        preferred: Share of held-out pairs in the right order, of a method that measures it.
        damage: What is wrong with its files, each by name; what is sound of them is in the other fields.
    """

    path: Path
    state: str
    step: int | None
    loss: float | None
    reward: float | None
    eval_loss: float | None
    token_accuracy: float | None
    tasks: Mapping[str, float]
    tokens: int | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    started: str | None
    seconds: float | None
    message: str | None
    eval_tokens: int | None = None
    preferred: float | None = None
    damage: Sequence[str] = ()


def find_runs(
    folder: Path, depth: int = _DEEPEST, closed: Callable[[Path, str], object] = lambda *_: None
) -> Iterator[Path]:
    """The run directories in ``folder`` and up to ``depth`` levels below it, by name. ``closed``: is told each folder
    whose content nobody can list, and why.
    """
    if is_run_directory(folder) or _was_run(folder):
        yield folder
        return
    reason = why_closed(folder)
    if reason is not None:
        closed(folder, reason)
        return
    if depth == 0:
        return
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:  # no folder
        return
    for path in inside:
        if not path.name.startswith("."):
            yield from find_runs(path, depth - 1, closed)


def _was_run(folder: Path) -> bool:
    """True if a folder has several of a run's files, whatever they are by now."""
    run = RunDirectory(folder)
    return sum(map(os.path.lexists, (run.status_path, run.metrics_path, run.checkpoints_dir))) > 1


def summarise(path: Path) -> RunSummary:
    """Summarises the run in ``path``; missing or damaged values are None."""
    run = RunDirectory(path)
    status, evaluation = read_status(run.status_path), read_json_object(run.eval_path)
    metrics = read_metrics(run.metrics_path)
    lines = metrics.lines
    training = [line for line in lines if is_number(line.get("loss")) or "reward" in line]
    last: MetricsLine = training[-1] if training else {}
    held_out: MetricsLine = next(
        (line for line in reversed(lines) if number_or_none(line.get("eval_loss")) is not None), {}
    )
    result = evaluation.get("run")
    scores: JsonMap = result if isinstance(result, dict) else {}
    return RunSummary(
        path=path,
        state=_state(path, None if status is None else status.state),
        step=int(last["step"]) if last else None,
        loss=number_or_none(last.get("loss")),
        reward=number_or_none(last.get("reward")),
        eval_loss=_first(scores.get("loss"), held_out.get("eval_loss")),
        token_accuracy=_first(scores.get("token_accuracy"), held_out.get("eval_token_accuracy")),
        tasks=_tasks(scores.get("tasks")),
        tokens=_whole(last.get("tokens")),
        tokens_per_second=_median(training, "tokens_per_second"),
        peak_memory_bytes=_whole(max(numbers_of(training, "peak_memory_bytes"), default=None)),
        started=None if status is None else status.started or None,
        seconds=None if status is None else status.seconds,
        message=None if status is None else status.message,
        eval_tokens=_whole(scores.get("tokens")),
        preferred=_first(map_in(scores, "measures").get("accuracy"), held_out.get("eval_accuracy")),
        damage=damage_of(run, metrics),
    )


def damage_of(run: RunDirectory, metrics: ReadMetrics) -> list[str]:
    """Lists damaged files of a run. A missing file is no damage, but for the recipe."""
    found = {run.status_path: status_damage(run.status_path), run.metrics_path: metrics.damage}
    for path in (run.recipe_path, run.manifest_path, run.eval_path, run.margins_path, run.tokens_path):
        try:
            map_of(read_text(path)) if path == run.recipe_path else json_object_in(path)
        except FileNotFoundError:
            found[path] = "it is missing" if path == run.recipe_path else ""
        except (OSError, ValueError) as error:
            found[path] = getattr(error, "strerror", None) or first_line(error)
    return [f"{path.name}: {reason}" for path, reason in found.items() if reason]


def _state(path: Path, state: str | None) -> str:
    if state is None:
        return "unknown"
    return "killed" if state == "running" and not is_locked(path) else state


def _tasks(found: object) -> dict[str, float]:
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    scores = {str(row.get("name")): number_or_none(row.get("value")) for row in rows}
    return {name: score for name, score in scores.items() if score is not None}


def _median(lines: Sequence[MetricsLine], name: str) -> float | None:
    values = numbers_of(lines, name)
    return statistics.median(values) if values else None


def _whole(value: object) -> int | None:
    number = number_or_none(value)
    return None if number is None else int(number)


def _first(*values: object) -> float | None:
    return next((number for value in values if (number := number_or_none(value)) is not None), None)
