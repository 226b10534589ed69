"""Experiment trackers as loggers of a run: TensorBoard, Weights & Biases, Trackio and MLflow.

TensorBoard writes event files to ``tensorboard/`` of the run directory. Files of W&B lie in ``wandb/`` of the run
directory; `wandb sync` uploads those of an offline run. Trackio keeps runs in a folder of its own; ``trackio show
--project ftcli`` shows them. MLflow has a run in the experiment ``ftcli`` of the tracking store that it is set to.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any
from urllib.parse import urlparse

import yaml

from ftcli.run.loggers import PROJECT, LoggedRun
from ftcli.run.status import State


class TensorBoardLogger:
    """Each process of a run writes a file of its own; TensorBoard shows them as one run."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What earlier files hold from `purge_step` on is not shown any more.
        purge_step = run.after_step + 1 if run.after_step else 0
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge_step)
        if not run.continued:
            text = yaml.safe_dump(run.recipe, sort_keys=False)
            self._writer.add_text("recipe", "\n".join(f"    {line}" for line in text.splitlines()), run.after_step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers through to the file."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, state: State) -> None:
        """Close the file."""
        self._writer.close()


def open_tensorboard(run: LoggedRun) -> TensorBoardLogger:
    """A new event file in the run directory."""
    return TensorBoardLogger(run)


#: Seconds to wait for somebody to log in on a terminal.
_LOGIN_SECONDS = 60


class WandbLogger:
    """A run of W&B under the run's own id, which it keeps when it is resumed."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        said = run.recipe.get("logging", {}).get("wandb")
        where = said if isinstance(said, dict) else {}
        self._run = wandb.init(
            # W&B reads WANDB_PROJECT, WANDB_ENTITY and WANDB_RUN_GROUP for what the recipe does not say.
            project=where.get("project"),
            entity=where.get("entity"),
            group=where.get("group"),
            name=run.name,
            id=run.id,
            resume="allow",
            reinit="create_new",
            dir=str(run.folder),
            config=run.recipe,
            mode="offline" if run.offline else None,
            settings=wandb.Settings(silent=True, console="off", login_timeout=_LOGIN_SECONDS),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers; W&B sends them in a process of its own."""
        self._run.log(dict(numbers), step=step)

    def finish(self, state: State) -> None:
        """Wait until everything is sent."""
        if state == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if state == "completed" else 1)


def open_wandb(run: LoggedRun) -> WandbLogger:
    """Start or continue the run of that id."""
    return WandbLogger(run)


class TrackioLogger:
    """A run of Trackio under the run's name. What Trackio prints is dropped: stdout belongs to the command's result."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=PROJECT,
                name=run.name,
                config=run.recipe,
                resume="allow" if run.continued else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Queue the numbers; a thread writes them."""
        with redirect_stdout(io.StringIO()):
            self._run.log(dict(numbers), step=step)

    def finish(self, state: State) -> None:
        """Wait until everything is written."""
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not the run's own method, after which Trackio would do this again at exit, and print


def open_trackio(run: LoggedRun) -> TrackioLogger:
    """Start the run, or continue the newest one of its name."""
    return TrackioLogger(run)


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


def open_mlflow(run: LoggedRun) -> MlflowLogger:
    """Start the run, or continue it where the store has it already."""
    return MlflowLogger(run)
