"""The smoke recipes really teach: held-out answers before and after, and nothing from shuffled rewards.

LoRA is run as it ships but for its length, which costs most of the time: 640 rows of 3,200, in smaller batches. GRPO is
run so in `make test-families`, 28 steps of 40 from three seeds; here its steps are fewer, larger, and of half as many
completions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main

RECIPES = Path(__file__).parents[2] / "recipes"

SMALL = ("train.max_steps=80", "train.per_device_train_batch_size=8", "train.learning_rate=4e-3")
SFT = [f"--set={setting}" for setting in (*SMALL, "data.eval=[{path: 'bundled:smoke-eval', max_rows: 60}]")]
SHORT = (
    "train.max_steps=8",
    "train.per_device_train_batch_size=32",
    "train.learning_rate=0.2",
    "data.eval=[{path: 'bundled:smoke-grpo-eval', max_rows: 60}]",
)
GRPO = {"short": SHORT, "as it ships": ("train.max_steps=28",)}

SEEDS = [(0, pytest.mark.long), (1, pytest.mark.seeds), (2, pytest.mark.seeds)]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RUNS = [("short", 0), *(pytest.param("as it ships", seed, marks=marks) for seed, marks in SEEDS)]


def done(capture: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The result of a command that succeeds."""
    capture.readouterr()
    status = main([*words, "--json", "--quiet", "--offline"])
    document = json.loads(capture.readouterr().out)
    assert status == 0, document
    result: dict[str, Any] = document["result"]
    return result


def test_lora_lifts_held_out_exact_match_of_a_new_task_from_under_10_to_over_80_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = str(RECIPES / "smoke.yaml"), str(tmp_path / "run")
    done(capsys, "train", recipe, "--output-dir", run, *SFT)
    measured = done(capsys, "eval", recipe, "--run", run, *SFT)
    scores = {name: measured[name]["tasks"]["exact_match"]["score"] for name in ("base", "run")}
    assert scores["base"] < 0.1
    assert scores["run"] > 0.8


def grpo(capture: pytest.CaptureFixture[str], folder: Path, *settings: str) -> dict[str, Any]:
    """The result of the GRPO recipe."""
    recipe, run = str(RECIPES / "smoke-grpo.yaml"), str(folder / "run")
    return done(capture, "grpo", recipe, "--output-dir", run, *(f"--set={setting}" for setting in settings))


@pytest.mark.parametrize(("how", "seed"), RUNS)
def test_grpo_raises_held_out_accuracy(how: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = grpo(capsys, tmp_path, *GRPO[how], f"run.seed={seed}")
    before, after = result["before"]["exact_match"], result["after"]["exact_match"]
    assert after >= 0.8
    assert after - before >= 0.4


@pytest.mark.long
@pytest.mark.parametrize(("how", "seed"), RUNS)
def test_grpo_learns_nothing_from_shuffled_rewards(
    how: str, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = grpo(capsys, tmp_path, *GRPO[how], "grpo.shuffle_rewards=true", f"run.seed={seed}")
    assert result["after"]["exact_match"] - result["before"]["exact_match"] < 0.15
