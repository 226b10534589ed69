"""The smoke recipe of reward models teaches scores of held-out answers, and none from pairs that are turned round.

It is run as it ships with three seeds, and with pairs turned round, in `make test-families`; elsewhere in fewer
steps of half as many pairs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ftcli.assets import asset
from tests.recipes.test_smoke_preference import measured
from tests.tiers import SEEDS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-reward.yaml")
SHORT = (
    "train.max_steps=24",
    "train.per_device_train_batch_size=8",
    "train.learning_rate=5e-3",
    "data.eval=[{path: 'bundled:smoke-dpo-eval', max_rows: 40}]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.long
def test_pairs_teach_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, tmp_path, *SHORT, recipe=RECIPE)
    base, run = found["base"], found["run"]
    assert base["accuracy"] < 0.7  # a random score of a trained model
    assert run["accuracy"] >= 0.95
    assert run["margin"] > 2
    assert abs(run["chosen_reward"] + run["rejected_reward"]) < run["margin"]  # they are kept around 0


@pytest.mark.long
def test_shuffled_labels_teach_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in asset("data", "smoke-dpo-train.jsonl").read_text().splitlines()]
    for row in random.Random(0).sample(rows, len(rows) // 2):
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    path = tmp_path / "shuffled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = measured(capsys, tmp_path, *SHORT, f"data.train=['{path}']", recipe=RECIPE)
    assert found["run"]["margin"] < 0.5  # the order of scores that hardly differ is chance
    assert found["run"]["loss"] > 0.6


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_as_it_ships(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(capsys, tmp_path, f"run.seed={seed}", recipe=RECIPE)["run"]["accuracy"] >= 0.95
