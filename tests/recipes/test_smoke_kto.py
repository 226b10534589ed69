"""The smoke recipe of labelled answers really teaches which ones to give, and little from labels that are shuffled.

It is run as it ships, and with shuffled labels, in `make test-families`; elsewhere in fewer steps of half as many
answers at a higher rate.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from tests.recipes.test_smoke_preference import measured
from tests.tiers import SEEDS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-kto.yaml")
SHORT = (
    "train.max_steps=24",
    "train.per_device_train_batch_size=8",
    "train.learning_rate=3e-3",
    "data.eval=[{path: 'bundled:smoke-dpo-eval', max_rows: 40}]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def score(found: dict[str, Any], of: str) -> float:
    return float(found[of]["tasks"]["exact_match"]["score"])


def rows() -> list[dict[str, Any]]:
    """Labelled answers, bad ones first, with as many columns as TRL reads."""
    pairs = [json.loads(line) for line in asset("data", "smoke-dpo-train.jsonl").read_text().splitlines()]
    return [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for name in ("rejected", "chosen")
        for pair in pairs
    ]


def written(folder: Path, made: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return f"data.train=['{path}']"


@pytest.mark.long
def test_labelled_answers_teach_which_ones_to_give(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, tmp_path, *SHORT, written(tmp_path, rows()), recipe=RECIPE)
    base, run = found["base"], found["run"]
    assert (base["loss"], base["accuracy"], base["margin"]) == (0.5, 0.5, 0.0)
    assert run["accuracy"] >= 0.8
    assert run["margin"] > 0.5
    assert run["chosen_reward"] > run["rejected_reward"]
    assert score(found, "run") > score(found, "base") + 0.2


@pytest.mark.long
def test_shuffled_labels_teach_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, rng = rows(), random.Random(0)
    labels = [row["label"] for row in made]
    rng.shuffle(labels)
    shuffled = [{**row, "label": label} for row, label in zip(made, labels, strict=True)]
    found = measured(capsys, tmp_path, *SHORT, written(tmp_path, shuffled), recipe=RECIPE)
    assert found["run"]["margin"] < 0.3
    assert score(found, "run") <= 0.7


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_as_it_ships(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, tmp_path, f"run.seed={seed}", recipe=RECIPE)
    assert found["run"]["accuracy"] >= 0.95
    assert score(found, "base") < 0.5
    assert score(found, "run") >= 0.85
