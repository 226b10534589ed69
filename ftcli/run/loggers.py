"""The loggers of a run: each is given every number exactly once, and none of them can end the run.

What each was given last is kept in loggers.json. Steps that are trained again after a resume give the numbers that they
gave before, so a logger is not given them again. A new logger is a class like those below, and a row in
:mod:`ftcli.tables.loggers`.

TensorBoard writes event files to ``tensorboard/`` of the run directory. Files of W&B lie in ``wandb/`` of the run
directory; `wandb sync` uploads those of an offline run. Trackio keeps runs in a folder of its own; ``trackio show
--project ftcli`` shows them. MLflow has a run in the experiment ``ftcli`` of the tracking store that it is set to.
"""

from __future__ import annotations

import contextlib
import io
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

import yaml

from ftcli.errors import Finding, first_line
from ftcli.plain import JsonMap, JsonObject, is_number, map_in
from ftcli.reporting import Reporter
from ftcli.run.atomic import read_json_object, write_json
from ftcli.run.directory import RunDirectory
from ftcli.run.metrics import MetricsLine
from ftcli.run.recipe_changes import leaves
from ftcli.run.status import State, read_status
from ftcli.tables import code_of, loggers

#: Under this name loggers gather the runs of ftcli, where they have projects or experiments.
PROJECT = "ftcli"


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run whose numbers a logger is given. ``id``: twelve hexadecimal digits that it keeps when it is resumed;
    ``continued``: the logger was given earlier steps of it; ``after_step``: numbers of later steps follow, and what the
    logger holds of these is to be forgotten (0: the run begins here).
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


#: What a row of the table names: the class, or a function. Whatever it raises is reported, and the run goes on without.
OpenLogger = Callable[[LoggedRun], MetricsLogger]


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
        """Opens those that ``names`` say (:mod:`ftcli.tables.loggers`); one that fails is reported as the warning
        FT736. ``resume_step``: the step that the run continues after, 0 when it begins; ``new_series``: it continues in
        another way than before, so its numbers are not a repetition.
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
                earlier = self._given[name]
                self._given[name] = _Given(step, (*(earlier.names if step == earlier.step else ()), *new))
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
            message = f"logging.{name} has failed, and the run goes on without it: {first_line(error)}"
            help = "every number is in metrics.jsonl as well"
            self._reporter.finding(Finding("FT736", message, help=help, severity="warning"))

    def __enter__(self) -> OpenLoggers:
        return self

    def __exit__(self, *_: object) -> None:
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
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, state: State) -> None:
        self._writer.close()


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
        with redirect_stdout(io.StringIO()):
            self._run.log(dict(numbers), step=step)

    def finish(self, state: State) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not the run's own method, after which Trackio would do this again at exit, and print


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
        settings = [Param(key, str(value)[:_MOST_CHARACTERS]) for key, value in leaves(run.recipe).items()]
        for start in range(0, len(settings), _MOST_PARAMS):
            self._client.log_batch(self._id, params=settings[start : start + _MOST_PARAMS])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_FORBIDDEN.sub("_", name), value, now, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, state: State) -> None:
        self._client.set_terminated(self._id, _ENDINGS.get(state, "FAILED"))
