"""A training method is a row: a made-up one is trained by the command that its row names, and held to its rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest

from ftcli.config.load import LoadedRecipe
from ftcli.errors import Finding
from ftcli.plain import FLATTENED
from ftcli.plan.run import MethodMemory, RunPlan
from ftcli.preflight.checks.context import Context
from ftcli.preflight.checks.data import FirstRows
from ftcli.reporting import Session
from ftcli.tables import code_of, methods
from ftcli.tables.methods import Method
from ftcli.train.on_rows import train_on_rows
from tests.e2e.conftest import User


@dataclass(frozen=True, slots=True)
class Result:
    """What the made-up method answers."""

    trained: object = field(metadata=FLATTENED)
    method: str


def train(loaded: LoadedRecipe, session: Session) -> Result:
    """The made-up method: supervised fine-tuning that says its name."""
    return Result(train_on_rows(loaded, session), loaded.recipe.train.method)


def rules(context: Context) -> Iterator[Finding]:
    """It wants an even number of rows."""
    if context.recipe.train.per_device_train_batch_size % 2:
        yield context.error("FT261", "train.per_device_train_batch_size", "pairs need an even number of rows")


def row_rules(context: Context, first: FirstRows) -> Iterator[Finding]:
    """It wants conversations."""
    if not first.is_chat:
        yield context.error("FT413", first.path, "pairs are made of conversations")


def memory(plan: RunPlan) -> MethodMemory:
    """It keeps a second model."""
    return MethodMemory(plan.recipe.data.max_seq_len, reference_bytes=plan.shape.parameters)


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    row = Method(
        "pairs",
        "train",
        "training on pairs",
        "",
        run=f"{__name__}:train",
        trains="ftcli.methods.sft.train:Supervised",
        memory=f"{__name__}:memory",
        rules=f"{__name__}:rules",
        row_rules=f"{__name__}:row_rules",
        supports=MappingProxyType({"model.dtype": ("auto", "float32")}),
    )
    monkeypatch.setattr(methods, "TABLE", {**methods.TABLE, "pairs": row})
    return User(tmp_path, capsys)


def test_a_made_up_method_trains(user: User) -> None:
    recipe = user.recipe("r", train={"method": "pairs", "max_steps": 1, "per_device_train_batch_size": 2})
    assert user.done("train", recipe)["method"] == "pairs"
    checked = user.done("check", recipe)
    assert checked["memory"]["parts"]["reference model"] == checked["model"]["parameters"]


def test_a_command_of_its_own_comes_with_its_row(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(methods.row("pairs"), command="pair", help="Learn from pairs.")
    monkeypatch.setattr(methods, "TABLE", {**methods.TABLE, "pairs": row})
    recipe = user.recipe("r", train={"method": "pairs", "max_steps": 1, "per_device_train_batch_size": 2})
    assert user.done("pair", recipe)["method"] == "pairs"


def test_it_is_held_to_its_rules_and_to_what_it_supports(user: User) -> None:
    recipe = user.recipe("r", train={"method": "pairs", "max_steps": 1, "per_device_train_batch_size": 1})
    status, document = user.run("train", recipe, "--set", "model.dtype=float16")
    assert status == 2
    assert {finding["code"] for finding in document["findings"]} >= {"FT250", "FT261"}
    status, document = user.run("train", recipe, "--set", "train.method=pair")
    assert status == 2
    assert "pairs" in str(document["findings"])


def test_it_is_held_to_its_rules_about_rows(user: User) -> None:
    (user.folder / "plain.jsonl").write_text('{"text": "a"}\n')
    data = {"train": [str(user.folder / "plain.jsonl")], "max_seq_len": 64}
    recipe = user.recipe("r", data=data, train={"method": "pairs", "max_steps": 1, "per_device_train_batch_size": 2})
    status, document = user.run("check", recipe)
    assert status == 4
    assert "FT413" in [finding["code"] for finding in document["findings"]]


def test_every_code_reference_resolves() -> None:
    for row in methods.TABLE.values():
        for reference in (row.run, row.memory, row.rules, row.row_rules, row.trains, row.dry, row.survey):
            assert reference is None or callable(code_of(reference))
        for reference in (row.charts, row.scores):
            assert reference is None or code_of(reference)


def test_each_command_has_its_method() -> None:
    assert methods.commands() == ("train", "grpo")
    assert methods.names() == ("sft", "dpo", "orpo", "simpo", "reward", "kto", "distill", "distill_offline")


def test_a_method_that_names_no_measurement_of_rows_is_refused_by_eval(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(methods.row("pairs"), trains=None, rules=None, row_rules=None)
    monkeypatch.setattr(methods, "TABLE", {**methods.TABLE, "pairs": row})
    status, document = user.run("eval", user.recipe("r", train={"method": "pairs"}))
    assert status == 2
    (refusal,) = [each for each in document["findings"] if each["severity"] == "error"]
    assert refusal["code"] == "FT250"
    assert "train.method=sft" in refusal["help"]
