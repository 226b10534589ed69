"""Command lines that cannot be understood."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = "command line"

CASES = [
    ("misspelt command", ["trian", "r.yaml"], "FT151", "`ftcli train`"),
    ("other tool's command", ["finetune", "r.yaml"], "FT151", "`ftcli train`"),
    ("another tool's word for converting", ["import", "a.yml"], "FT151", "`ftcli recipes convert`"),
    ("recipe without a command", ["r.yaml"], "FT151", "`ftcli train r.yaml` or `ftcli check r.yaml`"),
    ("no such command", ["zzzz"], "FT151", "commands: train, grpo, eval"),
    ("no recipe", ["check"], "FT150", "`ftcli check --help`"),
    ("two recipes", ["check", "a.yaml", "b.yaml"], "FT150", "`ftcli check --help`"),
    ("override of other tools", ["train", "r.yaml", "lora.r=8"], "FT150", "write --set lora.r=8"),
    ("key as an option", ["train", "r.yaml", "--learning-rate", "1e-4"], "FT150", "--set train.learning_rate=VALUE"),
    ("other tool's option", ["train", "r.yaml", "--lora_rank", "8"], "FT150", "--set lora.r=VALUE"),
    ("misspelt option", ["check", "r.yaml", "--ofline"], "FT150", "did you mean --offline?"),
    ("option of another command", ["eval", "r.yaml", "--zzz"], "FT150", "`ftcli eval --help`"),
    ("option before the command", ["--offline", "check", "r.yaml"], "FT150", "after the command"),
    ("text for a number", ["bench", "r.yaml", "--steps", "ten"], "FT150", "`ftcli bench --help`"),
    ("negative steps", ["bench", "r.yaml", "--steps", "-1"], "FT150", "`ftcli bench --help`"),
    ("negative batch", ["bench", "r.yaml", "--batch", "-1"], "FT150", "`ftcli bench --help`"),
    ("recipe on another storage", ["train", "s3://b/r.yaml"], "FT165", "mount the storage"),
    ("run on another storage", ["chat", "s3://b/r"], "FT165", "mount the storage"),
    ("runs on another storage", ["runs", "s3://b"], "FT165", "mount the storage"),
    ("compared runs on another storage", ["compare", "s3://b/r"], "FT165", "mount the storage"),
    ("converting from another storage", ["recipes", "convert", "s3://b/r"], "FT165", "mount the storage"),
    ("method by another name", ["rm", "r.yaml"], "FT151", "reward modelling is `train.method: reward`"),
    ("copy to another storage", ["recipes", "copy", "smoke", "s3://b/r"], "FT165", "mount the storage"),
    ("method that is not offered", ["ppo", "r.yaml"], "FT151", "PPO is not offered yet"),
    ("method that is a key", ["kto", "r.yaml"], "FT151", "KTO is `train.method: kto` of `ftcli train`"),
    ("method as a command", ["dpo", "r.yaml"], "FT151", "DPO is `train.method: dpo` of `ftcli train`"),
    ("no such subcommand", ["recipes", "lst"], "FT150", "`ftcli recipes --help`"),
    ("no such shipped recipe", ["recipes", "show", "zzzz"], "FT152", "choose from: "),
    ("export of a folder", ["export", "."], "FT154", "runs/smoke"),
]


@pytest.mark.parametrize(("argv", "code", "help"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_command_line_is_refused(refused: Callable[..., object], argv: list[str], code: str, help: str) -> None:
    refused(argv, code=code, at=HERE, help=help)


def test_option_without_a_value(ftcli: Callable[..., object]) -> None:
    outcome = ftcli("check", "r.yaml", "--set")
    assert outcome.status == 2
    assert "command line: error[FT150]: " in outcome.stderr
    assert "`ftcli check --help`" in outcome.stderr


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["sample", "r.yaml", "--output", ""], "--output ''"),
        (["export", "run", "--output", ""], "--output ''"),
        (["compare", "run", "--html", " "], "--html ' '"),
        (["sweep", "r.yaml", "--set", "lora.r=2,4", "--output-dir", ""], "--output-dir ''"),
        (["recipes", "copy", "smoke", ""], "FILE ''"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_variable_that_is_not_set_is_no_folder(refused: Callable[..., object], argv: list[str], option: str) -> None:
    """`--output "$OUT"` wrote into the working folder."""
    Path("run").mkdir()
    for path in ("r.yaml", "run/recipe.yaml"):
        Path(path).write_text("version: 1\nmodel: {name_or_path: bundled:tiny-gemma2}\n")
    refused(argv, code="FT150", at=option, help="leave the option out")


def test_run_that_is_none(refused: Callable[..., object]) -> None:
    Path("r.yaml").write_text("version: 1\nmodel: {name_or_path: m}\n")
    refused(["eval", "r.yaml", "--run", "nowhere"], code="FT154", at="--run nowhere", help="runs/smoke")


@pytest.mark.parametrize("text", ["lognormal:380", "lognormal:nan,1", "normal:380,100", "no/such/file", "."])
def test_lengths_that_are_none(refused: Callable[..., object], text: str) -> None:
    Path("r.yaml").write_text("version: 1\nmodel: {name_or_path: m}\n")
    refused(["bench", "r.yaml", "--lengths", text], code="FT157", at="--lengths", help="lognormal:380,0.8")


def test_copy_does_not_overwrite(refused: Callable[..., object]) -> None:
    Path("mine.yaml").write_text("precious")
    refused(["recipes", "copy", "smoke", "mine.yaml"], code="FT153", at=HERE, help="--force")
    assert Path("mine.yaml").read_text() == "precious"


def test_copy_into_a_folder_that_is_missing(refused: Callable[..., object]) -> None:
    refused(["recipes", "copy", "smoke", "no/such/mine.yaml"], code="FT155", at=HERE, help="folder that exists")


def test_usage_error_with_json_is_one_document(ftcli: Callable[..., object]) -> None:
    outcome = ftcli("check", "--json")
    document = json.loads(outcome.stdout)
    assert document["exit_code"] == outcome.status == 2
    assert [finding["code"] for finding in document["findings"]] == ["FT150"]


@pytest.mark.parametrize(
    ("argv", "at", "help"),
    [
        (["sweep", "r.yaml", "--set", "lora.r=8"], HERE, "two values or more"),
        (["sweep", "r.yaml"], HERE, "two values or more"),
        (["sweep", "r.yaml", "--set", "lora.r=8,,16"], "--set lora.r=8,,16", "separated by commas"),
        (["sweep", "r.yaml", "--set", "run.name=a,b"], "--set run.name=a,b", "--output-dir"),
    ],
)
def test_sweep_without_a_grid(refused: Callable[..., object], argv: list[str], at: str, help: str) -> None:
    Path("r.yaml").write_text("version: 1\nmodel: {name_or_path: m}\n")
    refused(argv, code="FT156", at=at, help=help)
