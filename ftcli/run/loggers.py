"""The loggers of a run: each is given every number exactly once, and none of them can end the run.

What each was given last is kept in loggers.json. Steps that are trained again after a resume give the numbers that they
gave before, so a logger is not given them again.

The code of each kind lies in :mod:`ftcli.run.trackers`; a new one is a class and a function that opens it, like those
there, and a row in :mod:`ftcli.tables.loggers`.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ftcli.errors import Finding, first_line
from ftcli.plain import JsonMap, JsonObject, is_number, map_in
from ftcli.reporting import Reporter
from ftcli.run.atomic import read_json_object, write_json
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine
from ftcli.run.status import State, read_status
from ftcli.tables import code_of, loggers

#: Under this name loggers gather the runs of ftcli, where they have projects or experiments.
PROJECT = "ftcli"


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run whose numbers a logger is given.

    Attributes:
        name: The run's name.
        id: Twelve hexadecimal digits. A run keeps them when it is resumed, and no other run has them.
        folder: The run directory.
        recipe: The resolved recipe as plain values.
        continued: This logger was given earlier steps of the same run.
        after_step: Numbers of later steps follow; 0 when the run begins here. What the logger holds of later steps is
            to be forgotten.
        offline: No network may be used.
    """

    name: str
    id: str
    folder: Path
    recipe: JsonObject
    continued: bool
    after_step: int
    offline: bool


class MetricsLogger(Protocol):
    """Takes the numbers of one run. Whatever a method raises is reported and ends this logger, never the run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of an optimizer step. Steps never decrease; one step can come in several calls."""
        ...

    def finish(self, state: State) -> None:
        """Close; ``state`` is how the run ended. Nothing is called after it."""
        ...


class OpenLogger(Protocol):
    """The function that a row of the table names."""

    def __call__(self, run: LoggedRun) -> MetricsLogger:
        """Open the logger. Whatever this raises is reported, and the run goes on without the logger."""
        ...


@dataclass(frozen=True, slots=True)
class _Given:
    """The last step of which a logger was given numbers, and their names."""

    step: int
    names: tuple[str, ...] = ()

    def not_yet(self, step: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """The ``numbers`` that the logger was not given before."""
        if step < self.step:
            return {}
        return {name: value for name, value in numbers.items() if step > self.step or name not in self.names}

    def and_also(self, step: int, numbers: Mapping[str, float]) -> _Given:
        """The record once ``numbers`` are given, too."""
        return _Given(step, (*(self.names if step == self.step else ()), *numbers))


class OpenLoggers:
    """Context manager around the loggers that a recipe switches on. At its end they are told how the run ended."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        recipe: JsonMap,
        reporter: Reporter,
        *,
        resume_step: int,
        new_series: bool = False,
        offline: bool = False,
    ) -> None:
        """Open them. One that fails is reported as the warning FT736.

        Args:
            names: Rows of :mod:`ftcli.tables.loggers`.
            folder: The run directory.
            recipe: The resolved recipe as plain values.
            resume_step: The step that the run continues after; 0 when it begins.
            new_series: The run continues in another way than it went before: its numbers are not a repetition.
        """
        self._reporter = reporter
        self._folder = folder
        self._path = folder / "loggers.json"
        self._open: dict[str, MetricsLogger] = {}
        self._id, self._given = self._read(keep=resume_step > 0 and not new_series)
        self._lasting = dict(self._given)
        for name in names:
            with self._failing_alone(name):
                given = self._given.setdefault(name, _Given(resume_step))
                run = LoggedRun(
                    name=str(recipe["run"]["name"] or folder.name),
                    id=self._id,
                    folder=folder,
                    recipe=dict(recipe),
                    continued=bool(given.names),
                    after_step=given.step,
                    offline=offline,
                )
                open_logger: OpenLogger = code_of(loggers.row(name).code)
                self._open[name] = open_logger(run)
        if names:
            self._write()

    def log(self, step: int, line: MetricsLine) -> None:
        """Give the numbers of a line of metrics to all loggers; what is no number is left out."""
        numbers = {name: float(value) for name, value in line.items() if _is_number(value) and name != "step"}
        for name, logger in list(self._open.items()):
            new = self._given[name].not_yet(step, numbers)
            if not new:
                continue
            with self._failing_alone(name):
                logger.log(step, new)
                self._given[name] = self._given[name].and_also(step, new)
                if not loggers.row(name).buffered:
                    self._lasting[name] = self._given[name]
        if self._open:
            self._write()

    def _read(self, *, keep: bool) -> tuple[str, dict[str, _Given]]:
        """The run's id and what each logger was given; a new id when the series begins here."""
        known = read_json_object(self._path) if keep else {}
        entries = {name: map_in(map_in(known, "given"), name) for name in map_in(known, "given")}
        given = {
            name: _Given(int(entry["step"]), tuple(map(str, entry["names"])))
            for name, entry in entries.items()
            if is_number(entry.get("step")) and isinstance(entry.get("names"), list)
        }
        return str(known.get("id") or secrets.token_hex(6)), given

    def _write(self) -> None:
        """Note what the loggers were given, as far as it outlasts this process."""
        given = {name: asdict(lasting) for name, lasting in self._lasting.items()}
        with contextlib.suppress(OSError):  # metrics.jsonl says what is wrong with the disk; this costs a point twice
            write_json(self._path, {"id": self._id, "given": given})

    @contextlib.contextmanager
    def _failing_alone(self, name: str) -> Iterator[None]:
        """A block in which nothing but this logger can fail; it is not called again then."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - code of others, which may raise anything; the run is worth more
            self._open.pop(name, None)
            reason = first_line(error)
            self._reporter.finding(
                Finding(
                    "FT736",
                    f"logging.{name} has failed, and the run goes on without it: {reason}",
                    help="every number is in metrics.jsonl as well",
                    severity="warning",
                )
            )

    def __enter__(self) -> OpenLoggers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        status = read_status(RunDirectory(self._folder).status_path)
        state = "failed" if status is None or status.state == "running" else status.state
        for name, logger in list(self._open.items()):
            with self._failing_alone(name):
                logger.finish(state)
                self._lasting[name] = self._given[name]
        if self._open:
            self._write()
        self._open.clear()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
