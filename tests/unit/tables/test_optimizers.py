"""An optimizer is a row: one that ftcli does not know trains, and is counted, as soon as the table has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.plan.trained import OptimizerState, TrainedMatrices, TrainedParameters, optimizer_state
from ftcli.preflight.checks import crossfield
from ftcli.preflight.checks.context import Context
from ftcli.tables import optimizers
from tests.e2e.conftest import User


@pytest.fixture
def rmsprop(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that transformers has and the table has not."""
    row = optimizers.Optimizer(state_bytes=4, reads=("adam_epsilon",))
    monkeypatch.setattr(optimizers, "TABLE", {**optimizers.TABLE, "rmsprop": row})


@pytest.mark.usefixtures("rmsprop")
def test_a_made_up_optimizer_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = User(tmp_path, capsys)
    done = user.done("train", user.recipe("r", train={"optim": "rmsprop", "max_steps": 2}))
    assert done["steps"] == 2
    assert "optim: rmsprop" in (tmp_path / "r" / "recipe.yaml").read_text()


@pytest.mark.usefixtures("rmsprop")
def test_its_state_is_counted_and_the_settings_that_it_reads_are_known(context: Callable[..., Context]) -> None:
    assert optimizer_state("rmsprop", TrainedParameters(1000, (TrainedMatrices(10, 100, 1),))) == OptimizerState(4000)

    def without_effect(*overrides: str) -> list[str]:
        findings: Any = crossfield.check(context("data: {train: [a.jsonl]}\n", *overrides))
        return [finding.message for finding in findings if finding.code == "FT259"]

    settings = ("train.adam_epsilon=1e-6", "train.adam_beta1=0.8")
    assert without_effect("train.optim=rmsprop", *settings) == ["train.adam_beta1 has no effect with optim: rmsprop"]
    assert without_effect(*settings) == []


def test_an_optimizer_without_a_row_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = User(tmp_path, capsys)
    status, document = user.run("check", user.recipe("r", train={"optim": "rmsprop"}))
    assert status == 2
    assert "adamw_torch_fused" in json.dumps(document["findings"])
