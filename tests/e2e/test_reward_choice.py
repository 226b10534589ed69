"""Which reward model is the best: of a run's checkpoints, of a sweep's runs, and beside each other in a comparison."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ftcli.cli.app import main
from tests.e2e.conftest import User, merged
from tests.e2e.resilience import Drills
from tests.e2e.test_reward import PAIRS
from tests.tiers import telling

#: Held-out pairs of which a model with random weights has some in order, and which training moves back and forth.
CHOOSING: dict[str, Any] = merged(
    PAIRS,
    {
        "data": {"eval": [{"path": "bundled:smoke-dpo-eval", "max_rows": 15}]},
        "train": {"max_steps": 8, "learning_rate": 2e-2, "lr_scheduler_type": "constant"},
        "eval": {"every_steps": 1},
        "checkpoint": {"every_steps": 50, "keep_best": True},
    },
)


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


@pytest.mark.parametrize(
    ("metric", "sign"),
    telling({"accuracy": ("accuracy", 1), "margin": ("margin", 1), "loss": (None, -1)}, "accuracy", "loss"),
)
def test_the_best_checkpoint_is_that_of_the_recipe_s_measure(metric: str | None, sign: int, user: User) -> None:
    """Without one that of the lowest loss; the earliest of those that tie."""
    recipe = user.recipe("r", **merged(CHOOSING, {"train": {"metric_for_best_model": metric}}))
    user.done("train", recipe)
    name = f"eval_{metric or 'loss'}"
    found = {line["step"]: sign * line[name] for line in user.metrics("r") if name in line and 0 < line["step"] < 8}
    assert len(found) == 7
    assert len(set(found.values())) > 1
    best = max(sorted(found), key=lambda step: found[step])
    kept = sorted(path.name for path in (user.folder / "r" / "checkpoints").glob("step-*"))
    assert f"step-{best:08}" in kept
    told = user.done("eval", recipe, "--run", str(user.folder / "r"), "--checkpoint", "best")["run"]
    assert told[metric or "loss"] == pytest.approx(sign * found[best], rel=1e-3)


def test_early_stopping_goes_by_the_measure_and_a_cut_off_run_goes_on_alike(user: User) -> None:
    change = {
        "train": {"metric_for_best_model": "accuracy", "early_stopping": {"patience": 2}, "max_steps": 20},
        "checkpoint": {"every_steps": 3, "keep_last": 1},
    }
    recipe = user.recipe("r", **merged(CHOOSING, change))
    result = user.done("train", recipe)
    found = {line["step"]: line["eval_accuracy"] for line in user.metrics("r") if "eval_accuracy" in line}
    best = max((step for step in found if step), key=lambda step: (found[step], -step))
    assert result["steps"] == best + 2 < 20
    assert result["stopped_early"] == f"no better accuracy than that of step {best} in 2 evaluations"
    user.goes_on_alike("r", recipe)


@pytest.mark.long
def test_a_sweep_names_the_run_with_the_most_pairs_in_order_and_compare_shows_them(
    drills: Drills, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses are no measure of pairs: one that pulls scores to 0 is larger, whatever it orders."""
    change = merged(CHOOSING, {"eval": {"every_steps": None}, "checkpoint": {"keep_best": False}})
    recipe = drills.recipe("r", **change)
    words = ("--set", "train.learning_rate=1e-5,2e-2", "--set", "reward.center_rewards_coefficient=0,0.5", "--json")
    prepared = (("warm_children", drills.server.socket), ("warm_check",))
    drills.run(recipe, *words, command="sweep", prepared=prepared)
    runs = sorted(path.parent for path in (drills.folder / "r").rglob("status.json"))
    assert len(runs) == 4
    scores = {run: json.loads((run / "eval.json").read_text())["run"]["measures"]["accuracy"] for run in runs}
    said = drills.run(recipe, *words, command="sweep", prepared=prepared)
    result = json.loads(said[said.index("{") :])["result"]
    assert all(run["skipped"] for run in result["runs"])
    best = max(scores.values())
    assert scores[drills.folder / result["best"]["path"]] == best > min(scores.values())
    assert result["best"]["metric"] == "share of held-out pairs in the right order"
    capsys.readouterr()
    assert main(["compare", str(runs[0]), str(runs[-1]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["result"]
    rows = {label: texts for label, *texts in document["rows"]}
    assert {"train.learning_rate", "reward.center_rewards_coefficient"} <= {
        each["key"] for each in document["differences"]
    }
    (shown,) = [texts for label, texts in rows.items() if "right order" in label]
    assert shown == [f"{scores[run]:.1%}" for run in (runs[0], runs[-1])]
