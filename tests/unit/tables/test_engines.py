"""An engine is a row: a made-up one starts the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ftcli.plain import FLATTENED
from ftcli.reporting import Session
from ftcli.tables import code_of, engines
from ftcli.tables.engines import LaunchEngine
from tests.e2e.conftest import User


@dataclass(frozen=True, slots=True)
class Launched:
    """What the work answers, and how many processes were asked for."""

    result: object = field(metadata=FLATTENED)
    processes: int


def launch(work: Callable[[None], object], session: Session, processes: int) -> Launched:
    """The made-up engine: runs the work here, and says what it was asked for."""
    return Launched(work(None), processes)


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.setattr(engines, "TABLE", {**engines.TABLE, "made-up": LaunchEngine(f"{__name__}:launch")})
    return User(tmp_path, capsys)


def test_a_made_up_engine_starts_the_run(user: User) -> None:
    launched = {"engine": "made-up", "num_processes": 1}
    recipe = user.recipe("r", train={"max_steps": 1}, launch=launched)
    assert user.done("train", recipe)["processes"] == 1
    status, document = user.run("check", recipe, "--set", "launch.engine=madeup")
    assert status == 2
    assert "made-up" in str(document["findings"])


def test_a_number_of_processes_that_an_engine_does_not_take_is_refused_by_name(user: User) -> None:
    launched = {"engine": "single", "num_processes": 2}
    status, document = user.run("train", user.recipe("r", train={"max_steps": 1}, launch=launched))
    assert status == 2
    assert {finding["code"] for finding in document["findings"]} == {"FT250"}


def test_every_code_reference_resolves() -> None:
    for row in engines.TABLE.values():
        assert callable(code_of(row.run))
