"""Loggers beside metrics.jsonl: every number once, whatever happens to the run or to a logger."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftcli.cli.environment import library_environment
from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.reporting import Session, SilentReporter
from ftcli.run import status
from ftcli.run.loggers import LoggedRun, OpenLoggers, WandbLogger
from ftcli.run.status import State
from ftcli.tables import loggers

RECIPE = Recipe.model_validate({"version": 1, "run": {"name": "demo"}, "model": {"name_or_path": "m"}})
Points = list[tuple[int, dict[str, float]]]


class Memory:
    """A logger that keeps what it is given beside the run, as a server would; ``broken`` names what fails."""

    def __init__(self, run: LoggedRun, *, broken: str = "") -> None:
        self.run, self.broken = run, broken
        self.path = run.folder.parent / f"{run.id}.json"
        self._fail_at("open")

    def _fail_at(self, what: str) -> None:
        if what == self.broken:
            raise ConnectionError(f"no {what} today\nand no tomorrow")

    def _add(self, entry: Any) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else []
        self.path.write_text(json.dumps([*known, entry]))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._fail_at("log")
        self._add([step, dict(numbers)])

    def finish(self, state: State) -> None:
        self._fail_at("finish")
        self._add(state)


def open_broken_at_open(run: LoggedRun) -> Memory:
    return Memory(run, broken="open")


def open_broken_at_log(run: LoggedRun) -> Memory:
    return Memory(run, broken="log")


def open_broken_at_finish(run: LoggedRun) -> Memory:
    return Memory(run, broken="finish")


class Listener(SilentReporter):
    """Keeps findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def finding(self, finding: Finding) -> None:
        self.findings.append(finding)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def row(name: str, buffered: bool = False) -> loggers.Logger:
        return loggers.Logger(package="json", install="json", about="", code=f"{__name__}:{name}", buffered=buffered)

    rows = {
        "memory": row("Memory"),
        "buffered": row("Memory", buffered=True),
        "closed": row("open_broken_at_open"),
        "deaf": row("open_broken_at_log"),
        "endless": row("open_broken_at_finish"),
    }
    monkeypatch.setattr(loggers, "TABLE", {**loggers.TABLE, **rows})
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def opened(folder: Path, *names: str, resume_step: int = 0, **more: Any) -> OpenLoggers:
    reporter = more.pop("reporter", SilentReporter())
    return OpenLoggers(names, folder, RECIPE.model_dump(mode="json"), reporter, resume_step=resume_step, **more)


def written(folder: Path) -> list[list[Any]]:
    """What the made-up loggers hold, one list for each series."""
    return [json.loads(path.read_text()) for path in sorted(folder.parent.glob("*.json"))]


def train(run: OpenLoggers, *steps: int) -> None:
    for step in steps:
        run.log(step, {"step": step, "loss": 1 / step, "epoch": None, "note": "x", "on": True})
        if step % 2 == 0:
            run.log(step, {"step": step, "eval_loss": 2 / step})


def test_numbers_and_nothing_else_reach_a_logger_with_the_state_at_the_end(folder: Path) -> None:
    with opened(folder, "memory") as run:
        train(run, 1, 2)
        status.begin(folder / "status.json", resumed_from=None)
        status.write_end(folder / "status.json", 0)
    assert written(folder) == [[[1, {"loss": 1.0}], [2, {"loss": 0.5}], [2, {"eval_loss": 1.0}], "completed"]]


def test_a_killed_run_goes_on_in_the_same_series_without_a_number_twice(folder: Path) -> None:
    train(opened(folder, "memory"), 1, 2, 3, 4)  # killed: never closed
    train(opened(folder, "memory", resume_step=2), 3)  # and again, before it got as far as before
    with opened(folder, "memory", resume_step=2) as run:
        train(run, 3, 4, 5)
    (series,) = written(folder)
    assert [entry[0] for entry in series[:-1]] == [1, 2, 2, 3, 4, 4, 5]
    assert series[-1] == "failed"


def test_an_evaluation_that_a_stop_left_out_follows_after_the_resume(folder: Path) -> None:
    opened(folder, "memory").log(4, {"loss": 1.0})
    opened(folder, "memory", resume_step=4).log(4, {"eval_loss": 2.0})
    assert written(folder) == [[[4, {"loss": 1.0}], [4, {"eval_loss": 2.0}]]]


def test_a_run_that_begins_again_or_is_led_elsewhere_has_a_series_of_its_own(folder: Path) -> None:
    train(opened(folder, "memory"), 1, 2)
    train(opened(folder, "memory"), 1)
    train(opened(folder, "memory", resume_step=1, new_series=True), 2)
    assert sorted(len(series) for series in written(folder)) == [1, 2, 3]


def test_a_logger_that_loses_its_buffer_is_given_the_numbers_again(folder: Path) -> None:
    train(opened(folder, "buffered"), 1, 2, 3)
    with opened(folder, "buffered", resume_step=1) as run:
        train(run, 3)
    train(opened(folder, "buffered", resume_step=1), 3, 5)  # closed well: it has kept the third
    (series,) = written(folder)
    assert [entry[0] for entry in series if entry != "failed"] == [1, 2, 2, 3, 3, 5]


@pytest.mark.parametrize("broken", ["closed", "deaf", "endless"])
def test_a_failing_logger_is_one_warning_and_nothing_more(folder: Path, broken: str) -> None:
    listener = Listener()
    with opened(folder, broken, "memory", reporter=listener) as run:
        train(run, 1, 3)
    (finding,) = listener.findings
    assert (finding.code, finding.severity) == ("FT736", "warning")
    assert f"logging.{broken}" in finding.message
    assert "tomorrow" not in finding.message
    (series,) = written(folder)
    numbers = [entry for entry in series if entry != "failed"]
    assert [step for step, _ in numbers][-1] == 3


def test_tensorboard_holds_every_number_once_and_the_recipe(folder: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(opened(folder, "tensorboard"), 1, 2, 3)
    with opened(folder, "tensorboard", resume_step=2) as run:
        train(run, 3, 4)
    with opened(folder, "tensorboard", resume_step=3, new_series=True) as run:
        train(run, 4)
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (step, pytest.approx(1 / step)) for step in (1, 2, 3, 4)
    ]
    assert [e.step for e in events.Scalars("eval_loss")] == [2, 4]
    assert b"name_or_path: m" in events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_holds_every_number_once_and_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parent}/mlflow.db")
    train(opened(folder, "mlflow"), 1, 2, 3)
    with opened(folder, "mlflow", resume_step=2, offline=True) as run:
        train(run, 3, 4)
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("ftcli").experiment_id])
    assert (found.info.run_name, found.info.status) == ("demo", "FAILED")
    assert found.data.params["model.name_or_path"] == "m"
    history = client.get_metric_history(found.info.run_id, "loss")
    assert sorted((m.step, m.value) for m in history) == [(step, 1 / step) for step in (1, 2, 3, 4)]


def test_mlflow_leaves_the_network_alone_when_it_has_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    listener = Listener()
    opened(folder, "mlflow", offline=True, reporter=listener)
    assert "--offline" in listener.findings[0].message


def test_wandb_keeps_the_id_of_the_run(folder: Path) -> None:
    pytest.importorskip("wandb")
    for resume_step in (0, 2):
        with opened(folder, "wandb", resume_step=resume_step, offline=True) as run:
            train(run, resume_step + 1, resume_step + 2)
    name = json.loads((folder / "loggers.json").read_text())["id"]
    assert list((folder / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (True, (None, None, None)),
        ({"project": "mine", "entity": "team", "group": "rates"}, ("mine", "team", "rates")),
        ({"group": "rates"}, (None, None, "rates")),
    ],
)
def test_wandb_is_given_project_entity_and_group(
    said: Any, expected: tuple[Any, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    fake = SimpleNamespace(init=lambda **words: given.update(words), Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = Recipe.model_validate({**RECIPE.model_dump(exclude_defaults=True), "logging": {"wandb": said}})
    WandbLogger(LoggedRun("demo", "0" * 12, folder, recipe.model_dump(mode="json"), False, 0, True))
    assert (given["project"], given["entity"], given["group"]) == expected


def test_wandb_has_a_project_where_the_user_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, expected in ((None, "ftcli"), ("mine", "mine")):
        monkeypatch.delenv("WANDB_PROJECT", raising=False)
        if named:
            monkeypatch.setenv("WANDB_PROJECT", named)
        with library_environment(Session(reporter=SilentReporter())):
            assert os.environ["WANDB_PROJECT"] == expected


def test_trackio_holds_every_number_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(folder.parent / "trackio"))  # read when trackio is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    for resume_step in (0, 2):
        with opened(folder, "trackio", resume_step=resume_step) as run:
            train(run, 2, 3)
    logs = storage.get_logs("ftcli", "demo")
    assert [(entry["step"], entry["loss"]) for entry in logs if "loss" in entry] == [(2, 1 / 2), (3, 1 / 3)]
    assert capsys.readouterr().out == ""
