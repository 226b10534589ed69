"""The smoke recipes really teach: held-out answers before and after, and nothing from shuffled rewards.

They are run as they ship but for their length, which costs most of the time: 40 steps of 100 for LoRA, 28 of 40 for
GRPO.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main

RECIPES = Path(__file__).parents[2] / "recipes"

SFT = ("--set", "train.max_steps=40")
GRPO = ("--set", "train.max_steps=28")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SEEDS = [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]


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


def grpo(capture: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    """The result of the GRPO recipe."""
    recipe, run = str(RECIPES / "smoke-grpo.yaml"), str(folder / "run")
    return done(capture, "grpo", recipe, "--output-dir", run, *GRPO, *words)


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_raises_held_out_accuracy(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = grpo(capsys, tmp_path, "--set", f"run.seed={seed}")
    before, after = result["before"]["exact_match"], result["after"]["exact_match"]
    assert after >= 0.8
    assert after - before >= 0.4


@pytest.mark.parametrize("seed", SEEDS)
def test_grpo_learns_nothing_from_shuffled_rewards(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = grpo(capsys, tmp_path, "--set", "grpo.shuffle_rewards=true", "--set", f"run.seed={seed}")
    assert result["after"]["exact_match"] - result["before"]["exact_match"] < 0.15
