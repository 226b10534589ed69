"""The recipe with tools teaches which tool answers which question, and nothing where rewards are shuffled."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from ftcli.cli.app import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-agent.yaml")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def rewards(folder: Path, *settings: str) -> list[float]:
    """The mean reward of each step."""
    words = [f"--set={setting}" for setting in settings]
    assert main(["grpo", RECIPE, "--output-dir", str(folder), *words, "--quiet", "--offline"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["reward"] for line in lines if "reward" in line]


def test_rewards_teach_which_tool_answers(tmp_path: Path) -> None:
    found = rewards(tmp_path / "run")
    assert fmean(found[:5]) < 0.7
    assert fmean(found[-5:]) > 0.85


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    found = rewards(tmp_path / "run", "grpo.shuffle_rewards=true", "train.max_steps=25")
    assert fmean(found[-5:]) < 0.65
