"""What a metrics logger is told of a run, and what it has to be able to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftcli.plain import JsonObject
from ftcli.run.status import State

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
