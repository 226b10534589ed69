"""The recipe with tools really teaches which tool answers which question, and nothing from shuffled rewards.

It is run as it ships, but for half of its steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.cli.app import main

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-agent.yaml")

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


def rewards(folder: Path, *settings: str) -> list[float]:
    """The mean reward of each step."""
    words = [f"--set={setting}" for setting in ("train.max_steps=16", *settings)]
    assert main(["grpo", RECIPE, "--output-dir", str(folder), *words, "--quiet", "--offline"]) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["reward"] for line in lines if "reward" in line]


@pytest.mark.parametrize("seed", [0, 1])
def test_rewards_teach_which_tool_answers(tmp_path: Path, seed: int) -> None:
    found = rewards(tmp_path / "run", f"run.seed={seed}")
    assert sum(found[:2]) / 2 < 0.8
    assert sum(found[-4:]) / 4 > 0.85


def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    found = rewards(tmp_path / "run", "grpo.shuffle_rewards=true")
    assert sum(found[-8:]) / 8 < 0.75
