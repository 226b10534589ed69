"""MLflow: a run in the experiment ``ftcli`` of the tracking store that MLflow itself is set to."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlparse

from ftcli.run.loggers.protocol import PROJECT, LoggedRun
from ftcli.run.status import State

_TAG = "ftcli_run"
_FORBIDDEN = re.compile(r"[^/\w.\- ]")
#: Of one request, and of one parameter's value.
_MOST_PARAMS, _MOST_CHARACTERS = 100, 6000
_LOCAL = ("", "file", "sqlite")
_ENDINGS: dict[State, str] = {"completed": "FINISHED", "preempted": "KILLED"}


class MlflowLogger:
    """A run of MLflow, found again by a tag with the run's id."""

    def __init__(self, run: LoggedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        uri = str(self._client.tracking_uri)
        if run.offline and urlparse(uri).scheme not in _LOCAL:
            raise ConnectionError(f"--offline, and MLflow's tracking store is {uri}")
        experiment = self._client.get_experiment_by_name(PROJECT)
        number = self._client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([number], f"tags.{_TAG} = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(number, run_name=run.name, tags={_TAG: run.id}).info.run_id
        settings = [Param(key, value[:_MOST_CHARACTERS]) for key, value in _leaves(run.recipe)]
        for start in range(0, len(settings), _MOST_PARAMS):
            self._client.log_batch(self._id, params=settings[start : start + _MOST_PARAMS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers to the store."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, state: State) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._id, _ENDINGS.get(state, "FAILED"))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its dotted key."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)


def open_logger(run: LoggedRun) -> MlflowLogger:
    """Start the run, or continue it where the store has it already."""
    return MlflowLogger(run)
