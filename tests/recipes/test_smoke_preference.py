"""The smoke recipe of pairs really teaches: order and answers of held-out pairs, and nothing from shuffled labels.

All of it in `make test-families`; what is not run as it ships takes fewer steps of half as many pairs at a higher rate.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from ftcli.cli.app import main
from tests.tiers import SEEDS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "smoke-dpo.yaml")
SHORT = (
    "train.max_steps=24",
    "train.per_device_train_batch_size=8",
    "train.learning_rate=4e-3",
    "data.eval=[{path: 'bundled:smoke-dpo-eval', max_rows: 40}]",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def done(capture: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The result of a command that succeeds."""
    capture.readouterr()
    status = main([*words, "--json", "--quiet", "--offline"])
    document = json.loads(capture.readouterr().out)
    assert status == 0, document
    result: dict[str, Any] = document["result"]
    return result


def measured(capture: pytest.CaptureFixture[str], folder: Path, *settings: str, recipe: str = RECIPE) -> dict[str, Any]:
    """What `ftcli eval` says of a run of the recipe, and of its base."""
    words = [f"--set={setting}" for setting in settings]
    done(capture, "train", recipe, "--output-dir", str(folder / "run"), *words)
    return done(capture, "eval", recipe, "--run", str(folder / "run"), *words)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_as_it_ships(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, tmp_path, f"run.seed={seed}")
    assert (found["base"]["accuracy"], found["base"]["margin"]) == (0.5, 0.0)
    assert found["run"]["accuracy"] >= 0.95
    assert found["run"]["margin"] > 1
    assert found["base"]["tasks"]["exact_match"]["score"] < 0.5
    assert found["run"]["tasks"]["exact_match"]["score"] >= 0.85


@pytest.mark.long
@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_methods_without_a_reference_teach_the_order(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(
        capsys,
        tmp_path,
        *SHORT,
        *("train.max_steps=16", "train.learning_rate=6e-3", "eval.tasks=[]", f"train.method={method}"),
    )
    assert found["base"]["accuracy"] < 0.7
    assert found["run"]["accuracy"] >= 0.95


@pytest.mark.long
def test_shuffled_labels_teach_no_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in asset("data", "smoke-dpo-train.jsonl").read_text().splitlines()]
    for row in random.Random(0).sample(rows, len(rows) // 2):
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    path = tmp_path / "shuffled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = [f"--set={setting}" for setting in (*SHORT, f"data.train=['{path}']", "eval.tasks=[]")]
    trained = done(capsys, "train", RECIPE, "--output-dir", str(tmp_path / "run"), *words)
    assert trained["eval"]["accuracy"] <= 0.7
