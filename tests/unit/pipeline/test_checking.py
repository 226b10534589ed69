"""`ftcli check --as all`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.facts.device import GPUS

RECIPE = """\
version: 1
model: {name_or_path: meta-llama/Llama-3.1-8B, init: random, tokenizer: bytes, dtype: bfloat16}
lora: {r: 16}
data: {train: ["bundled:sample-chat"], max_seq_len: 4096}
train: {learning_rate: 1e-4, max_steps: 3, per_device_train_batch_size: 2}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    return path


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    status = main(["check", "r.yaml", "--offline", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def test_each_gpu_says_what_a_check_of_it_alone_says(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = checked(capsys, "--as", "all")
    found = {each["gpu"]: each for each in document["result"]["gpus"]}
    assert status == 0
    assert {*found} == {*GPUS}
    memory = [each["available_bytes"] for each in document["result"]["gpus"]]
    assert memory == sorted(memory)
    assert found["t4"]["verdict"] == "refused"
    assert found["t4"]["reason"].startswith("FT501: t4 has no bfloat16")
    for name in ("l4", "h200"):
        alone = checked(capsys, "--as", name)[1]["result"]
        assert found[name]["verdict"] == alone["verdict"]["level"] == "fits"
        assert found[name]["peak_bytes"] == alone["verdict"]["needed_bytes"]
    policy = found["h200"]["gradient_checkpointing"]
    most = found["h200"]["most_rows"]
    batch = f"train.per_device_train_batch_size={most}", f"train.per_device_train_batch_size={2 * most}"
    words = "--as", "h200", "--set", f"train.gradient_checkpointing={policy}", "--set"
    assert most > 2
    assert checked(capsys, *words, batch[0])[1]["result"]["verdict"]["level"] == "fits"
    status, document = checked(capsys, *words, batch[1])
    assert status == 3 or document["result"]["verdict"]["level"] == "tight"


def test_where_it_does_not_fit_the_change_that_helps_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = "--set", "train.per_device_train_batch_size=64", "--set", "train.gradient_checkpointing=false"
    assert main(["check", "r.yaml", "--offline", "--as", "ALL", *wide]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split()[:2] == ["gpu", "verdict"]
    assert any(line.startswith("h100") and "does not fit" in line and "79.1 GiB" in line for line in lines)
    assert any(line.startswith("h100  FT601: does not fit: about ") and "--set train." in line for line in lines)


def test_what_is_wrong_with_the_recipe_itself_is_said_once(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = checked(capsys, "--as", "all", "--set", "lora.target_modules=[qq_proj]")
    assert (status, [each["code"] for each in document["findings"] if each["severity"] == "error"]) == (3, ["FT311"])
    status, document = checked(capsys, "--as", "all", "--show-sample", "2")
    assert (status, document["findings"][0]["code"]) == (2, "FT150")
