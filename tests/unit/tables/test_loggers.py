"""A metrics logger is a row and a function: the program opens, feeds and closes one that it has never seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from ftcli.cli.commands.doctor import examine
from ftcli.config.schema import published
from ftcli.reporting import Session
from ftcli.run.loggers import LoggedRun
from ftcli.run.status import State
from ftcli.tables import code_of, loggers
from tests.e2e.conftest import User


class Notebook:
    """The made-up logger: a line for each call, in a file beside the run."""

    def __init__(self, run: LoggedRun) -> None:
        self.path = run.folder.with_suffix(".notes")
        self._note({"name": run.name, "model": run.recipe["model"]["name_or_path"], "offline": run.offline})

    def _note(self, entry: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._note({"step": step, **numbers})

    def finish(self, state: State) -> None:
        self._note(state)


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    rows = {
        "notebook": loggers.Logger("json", "json", "Also write notes.", f"{__name__}:Notebook"),
        "quill": loggers.Logger("no_such_package", "no-such-package", "", "no_such_package:Quill"),
    }
    monkeypatch.setattr(loggers, "TABLE", {**loggers.TABLE, **rows})
    return User(tmp_path, capsys)


def test_a_made_up_logger_is_switched_on_by_its_name_and_given_everything(user: User) -> None:
    user.done("train", user.recipe("r", logging={"notebook": True}, train={"max_steps": 3}, eval={"every_steps": 2}))
    first, *given, last = [json.loads(line) for line in (user.folder / "r.notes").read_text().splitlines()]
    assert first == {"name": "r", "model": "bundled:tiny-gemma2", "offline": True}
    lines = [{name: v for name, v in line.items() if isinstance(v, int | float)} for line in user.metrics("r")]
    assert given == lines
    assert any("eval_loss" in line for line in given)
    assert last == "completed"


def test_the_checks_the_doctor_and_the_schema_know_it(user: User) -> None:
    status, document = user.run("check", user.recipe("r", logging={"quill": True}))
    assert status == 2
    (finding,) = [finding for finding in document["findings"] if finding["code"] == "FT253"]
    assert "logging.quill" in finding["message"]
    assert finding["help"] == "pip install 'no-such-package'"
    assert any(extra.use == "logging.quill" for extra in examine(Session()).extras)
    assert published()["$defs"]["LoggingConfig"]["properties"]["quill"]["type"] == "boolean"


def test_what_is_in_no_row_is_an_unknown_key(user: User) -> None:
    status, document = user.run("check", user.recipe("r", logging={"tensorbord": True}))
    assert status == 2
    assert "tensorboard" in document["findings"][0]["help"]
    assert user.run("check", user.recipe("r", logging={"wandb": "project"}))[1]["findings"][0]["code"] == "FT204"


def test_every_row_names_code_that_is_there() -> None:
    for name in loggers.names():
        assert callable(code_of(loggers.row(name).code))
