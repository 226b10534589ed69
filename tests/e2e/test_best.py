"""`checkpoint.keep_best` keeps the best checkpoint, `train.early_stopping` ends training when nothing gets better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.evaluate.loss import LossResult
from ftcli.evaluate.suite import Evaluator
from ftcli.train.evaluation import BestEvaluation, Goal
from tests.e2e.conftest import User
from tests.tiers import telling

#: So large a rate that the held-out loss rises from the second step on.
RISING: dict[str, Any] = {"learning_rate": 10.0, "lr_scheduler_type": "constant", "max_steps": 12}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def steps(user: User, name: str) -> list[str]:
    return sorted(path.name for path in (user.folder / name / "checkpoints").iterdir() if path.is_dir())


def held_out(user: User, name: str) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in user.metrics(name) if "eval_loss" in line}


def test_the_best_checkpoint_outlives_the_rotation(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before training, which is no checkpoint; after each step but the last; at the end.
    losses = iter([9.0, 2.0, 1.0, 3.0, 1.5, 4.0, 5.0])

    def loss(self: Evaluator, model: Any) -> LossResult:
        return LossResult(next(losses), 1.0, 0.0, 1, 1)

    monkeypatch.setattr(Evaluator, "loss", loss)
    checkpoint = {"every_steps": 2, "keep_last": 1, "keep_best": True}
    recipe = user.recipe("r", eval={"every_steps": 1, "samples": 0}, checkpoint=checkpoint)
    user.done("train", recipe)
    assert steps(user, "r") == ["step-00000002", "step-00000004"]
    state = json.loads((user.folder / "r" / "checkpoints" / "step-00000004" / "ftcli_state.json").read_text())
    assert state["best"] == {"value": 1.0, "step": 2, "worse": 2, "metric": None}


def test_training_ends_when_nothing_gets_better(user: User) -> None:
    stopping = {"patience": 2}
    recipe = user.recipe(
        "r", train={**RISING, "max_steps": 40, "early_stopping": stopping}, eval={"every_steps": 1, "samples": 0}
    )
    result = user.done("train", recipe)
    losses = held_out(user, "r")
    best = min(losses, key=lambda step: losses[step])
    assert result["steps"] == best + 2 < 40
    assert json.loads((user.folder / "r" / "status.json").read_text())["state"] == "completed"
    assert user.done("train", recipe)["already_complete"]


def test_a_run_that_goes_on_ends_where_the_other_did(user: User) -> None:
    train = {**RISING, "max_steps": 40, "early_stopping": {"patience": 2, "min_delta": 0.001}}
    change: dict[str, Any] = {
        "train": train,
        "eval": {"every_steps": 1, "samples": 0},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
    }
    recipe = user.recipe("r", **change)
    whole, losses = user.done("train", recipe), held_out(user, "r")
    run = user.cut_off("r")
    last = max((run / "checkpoints").iterdir())
    for path in sorted((run / "checkpoints").iterdir())[-2:]:
        for file in sorted(path.iterdir()):
            file.unlink()
        path.rmdir()
    assert last.name > max(path.name for path in (run / "checkpoints").iterdir())
    resumed = user.done("train", recipe)
    assert (resumed["steps"], resumed["train_loss"]) == (whole["steps"], whole["train_loss"])
    assert held_out(user, "r") == losses


@pytest.mark.parametrize(
    "change", [{"checkpoint": {"keep_best": True}}, {"train": {"early_stopping": {"patience": 1}}}]
)
def test_without_evaluations_it_is_refused(change: dict[str, Any], user: User) -> None:
    status, document = user.run("train", user.recipe("r", **change))
    assert (status, [finding["code"] for finding in document["findings"]]) == (2, ["FT255"])


def test_what_counts_as_better() -> None:
    best = BestEvaluation()
    assert best.note(1, {"eval_loss": 2.0}, 0.1)
    assert best.note(2, {"eval_loss": 1.95}, 0.1)  # the best so far, and no improvement
    assert (best.value, best.step, best.worse) == (1.95, 2, 1)
    assert not best.note(3, {"eval_loss": 1.99}, 0.1)
    assert best.worse == 2
    assert best.note(4, {"eval_loss": 1.5}, 0.1)
    assert best.worse == 0
    assert not best.note(5, {"eval_loss": float("nan")})
    assert not BestEvaluation().note(1, {})
    scores = BestEvaluation()
    assert scores.note(1, {"eval_exact_match": 0.5})
    assert not scores.note(2, {"eval_exact_match": 0.25})
    assert not scores.note(2, {"eval_exact_match": 0.5}), "of equal ones the first is the best"
    assert scores.step == 1
    assert scores.note(3, {"eval_exact_match": 0.75})


@pytest.mark.parametrize("full", telling({"adapter": False, "full fine-tuning": True}, "adapter"))
def test_a_checkpoint_is_evaluated_and_exported_in_place_of_the_result(full: bool, stored: User) -> None:
    user = stored
    change: dict[str, Any] = {"lora": None} if full else {}
    change["export"] = {"formats": ["safetensors"] if full else ["adapter", "safetensors"]}
    checkpoint = {"every_steps": 2, "keep_last": 9}
    recipe = user.recipe("r", eval={"every_steps": 2, "samples": 0}, checkpoint=checkpoint, **change)
    user.done("train", recipe)
    run = str(user.folder / "r")
    losses = held_out(user, "r")
    assert user.done("eval", recipe, "--run", run, "--checkpoint", "best")["run"]["loss"] == losses[6]  # the end
    lines = [line for line in user.metrics("r") if not (line["step"] == 6 and "eval_loss" in line)]
    (user.folder / "r" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (user.folder / "r" / "eval.json").read_bytes()
    for name, step in (("2", 2), ("best", 4)):
        found = user.done("eval", recipe, "--run", run, "--checkpoint", name)
        assert found["run"]["loss"] == pytest.approx(losses[step], rel=1e-5)
        assert found["checkpoint"].endswith(f"step-0000000{step}")
    after = (user.folder / "r" / "eval.json").read_bytes()
    assert after == before  # it is about the result
    exported = user.done("export", run, "--checkpoint", "2")["exports"]
    folders = [Path(each["path"]) for each in exported]
    assert {folder.parent for folder in folders} == {user.folder / "r" / "export" / "step-00000002"}
    for folder in folders:
        assert not {"trainer_state.json", "ftcli_state.json", "complete.json", "optimizer.pt"} & {
            path.name for path in folder.iterdir()
        }
    status, document = user.run("eval", recipe, "--run", run, "--checkpoint", "3")
    assert (status, document["findings"][0]["code"]) == (2, "FT725")
    assert "2, 4" in document["findings"][0]["help"]
    status, document = user.run("eval", recipe, "--checkpoint", "best")
    assert (status, document["findings"][0]["code"]) == (2, "FT154")


def test_the_recipe_says_what_is_best(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tie is no improvement; the loss, which falls all the time, is not looked at."""
    accuracies = iter([0.1, 0.5, 0.9, 0.9, 0.2, 0.9, 0.9])
    losses = iter(range(100, 0, -1))

    def loss(self: Evaluator, model: Any) -> LossResult:
        return LossResult(next(losses), 1.0, next(accuracies), 1, 1)

    monkeypatch.setattr(Evaluator, "loss", loss)
    recipe = user.recipe(
        "r",
        train={"metric_for_best_model": "token_accuracy", "early_stopping": {"patience": 3}, "max_steps": 9},
        eval={"every_steps": 1, "samples": 0},
        checkpoint={"every_steps": 1, "keep_last": 1, "keep_best": True},
    )
    result = user.done("train", recipe)
    assert result["steps"] == 5
    assert result["stopped_early"] == "no better token_accuracy than that of step 2 in 3 evaluations"
    assert steps(user, "r") == ["step-00000002", "step-00000005"]


def test_a_metric_is_better_where_it_is_larger_or_smaller_and_is_no_measure_of_another() -> None:
    best, accuracy, margin = BestEvaluation(), Goal("accuracy", True), Goal("margin", True)
    evaluations = [0.5, 0.7, 0.7, 0.6, 0.71, 0.8]
    noted = [best.note(step, {"eval_accuracy": value}, 0.02, accuracy) for step, value in enumerate(evaluations)]
    assert noted == [True, True, False, False, True, True]
    assert (best.step, best.value, best.worse) == (5, -0.8, 0)
    assert not best.note(6, {"eval_loss": 0.0}, goal=accuracy)
    assert not best.note(7, {"eval_accuracy": float("nan")}, goal=accuracy)
    assert best.note(8, {"eval_accuracy": 0.9, "eval_margin": -3.0}, goal=margin)
    assert (best.step, best.value, best.metric) == (8, 3.0, "margin")
    assert best.note(9, {"eval_loss": 2.0})
    assert best.note(10, {"eval_loss": 1.0, "eval_accuracy": 0.1}, goal=Goal("loss", False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train": {"metric_for_best_model": "loss"}}, "the recipe asks for neither"),
        (
            {"train": {"metric_for_best_model": "accuracy"}, "checkpoint": {"keep_best": True}},
            "accuracy is not measured while supervised fine-tuning trains",
        ),
    ],
)
def test_a_metric_that_nothing_measures_or_reads_is_refused(change: dict[str, Any], said: str, user: User) -> None:
    status, document = user.run("train", user.recipe("r", **{"eval": {"every_steps": 1}, **change}))
    assert (status, [finding["code"] for finding in document["findings"]]) == (2, ["FT255"])
    assert said in document["findings"][0]["message"]
