"""`eval.tasks_every_steps`: tasks are scored on the generation engine while training, and training goes by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import User

#: A judge whose scores are the test's: those of the file `scores`, one for each call.
JUDGE = """
from pathlib import Path

def scripted(completions, prompts, **columns):
    calls = Path(__file__).with_name("calls")
    done = int(calls.read_text()) if calls.exists() else 0
    calls.write_text(str(done + 1))
    scores = [float(line) for line in Path(__file__).with_name("scores").read_text().split()]
    return [scores[done]] * len(completions)
"""


@pytest.fixture
def user(narrow: User) -> User:
    (narrow.folder / "judge.py").write_text(JUDGE)
    return narrow


def scripted(user: User, *scores: float) -> dict[str, Any]:
    (user.folder / "scores").write_text(" ".join(str(score) for score in scores))
    (user.folder / "calls").unlink(missing_ok=True)
    return {"file": f"{user.folder / 'judge.py'}:scripted", "name": "course", "max_rows": 2}


def scores(user: User, name: str) -> dict[int, float]:
    return {line["step"]: line["eval_course"] for line in user.metrics(name) if "eval_course" in line}


def steps(user: User, name: str) -> list[str]:
    return sorted(path.name for path in (user.folder / name / "checkpoints").iterdir() if path.is_dir())


def test_tasks_are_scored_and_the_best_checkpoint_is_the_tasks(user: User) -> None:
    # Before training, after steps 2 and 4, at the end. The loss is measured after every step.
    task = scripted(user, 0.1, 0.75, 0.5, 0.25)
    recipe = user.recipe(
        "r",
        eval={"every_steps": 1, "tasks_every_steps": 2, "samples": 1, "tasks": [task, {"use": "exact_match"}]},
        train={"max_steps": 6, "metric_for_best_model": "course"},
        checkpoint={"every_steps": 5, "keep_last": 1, "keep_best": True},
    )
    (user.folder / "scores").write_text("0.1 0.75 0.5 0.25")
    result = user.done("train", recipe)
    assert result["eval"]["course"] == 0.25
    assert result["eval"]["loss"] > 0
    assert scores(user, "r") == {2: 0.75, 4: 0.5, 6: 0.25}
    assert {line["step"] for line in user.metrics("r") if "eval_loss" in line} == {1, 2, 3, 4, 5, 6}
    assert steps(user, "r") == ["step-00000002", "step-00000005"]
    said = json.loads((user.folder / "r" / "eval.json").read_text())
    of = {side: {task["name"]: task["value"] for task in said[side]["tasks"]} for side in ("base", "run")}
    assert (of["base"]["course"], of["run"]["course"]) == (0.1, 0.25)
    assert set(of["run"]) == {"course", "exact_match"}
    assert said["run"]["loss"] == result["eval"]["loss"]
    named = [row["task"] for row in said["samples"]]
    assert named.count("course") == 2
    assert named.count(None) == 1
    assert "Held-out course" in (user.folder / "r" / "report.html").read_text()


def test_training_ends_by_a_task_and_goes_on_as_if_never_stopped(user: User) -> None:
    course = (0.1, 0.5, 0.75, 0.75, 0.7, 0.9)
    change: dict[str, Any] = {
        "eval": {"every_steps": 1, "tasks_every_steps": 1, "samples": 0, "tasks": [scripted(user, *course)]},
        "train": {"max_steps": 40, "metric_for_best_model": "course", "early_stopping": {"patience": 2}},
        "checkpoint": {"every_steps": 1, "keep_last": 9},
    }
    recipe = user.recipe("r", **change)
    whole = user.done("train", recipe)
    assert whole["steps"] == 4
    assert scores(user, "r") == {1: 0.5, 2: 0.75, 3: 0.75, 4: 0.9}  # the last: the trained model, once more
    run = user.cut_off("r")
    last = max((run / "checkpoints").iterdir())
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    (user.folder / "calls").write_text("4")  # as many as were made before that step
    resumed = user.done("train", recipe)
    assert (resumed["steps"], resumed["train_loss"]) == (whole["steps"], whole["train_loss"])
    said = json.loads((run / "eval.json").read_text())
    assert said["base"]["tasks"][0]["value"] == 0.1


def test_tasks_with_rows_of_their_own_need_no_other_held_out_rows(user: User) -> None:
    task = {**scripted(user, 0.0, 0.5, 0.25), "data": [{"path": "bundled:smoke-eval", "max_rows": 2}]}
    recipe = user.recipe(
        "r",
        data={"eval": []},
        train={"max_steps": 4},
        eval={"every_steps": 2, "tasks_every_steps": 2, "tasks": [task]},
        checkpoint={"every_steps": 3, "keep_last": 1, "keep_best": True},
    )
    assert user.done("train", recipe)["eval"] == {"course": 0.25}
    assert steps(user, "r") == ["step-00000002", "step-00000003"]  # the best by the tasks' mean: there is no loss


@pytest.mark.parametrize(
    ("settings", "help"),
    [
        ({"every_steps": 2, "tasks_every_steps": 2}, "add one"),
        ({"every_steps": 2, "tasks_every_steps": 3, "tasks": [{"use": "exact_match"}]}, "eval.every_steps: 3"),
        ({"tasks_every_steps": 3, "tasks": [{"use": "exact_match"}]}, "eval.every_steps: 3"),
    ],
)
def test_what_cannot_be_scored_is_refused(settings: dict[str, Any], help: str, user: User) -> None:
    status, document = user.run("train", user.recipe("r", eval=settings))
    (finding,) = document["findings"]
    assert (status, finding["code"]) == (2, "FT255")
    assert help in finding["help"]


def test_rows_of_a_task_are_read_before_a_model_is_loaded(user: User, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    task = {**scripted(user, 0.0), "data": [str(tmp_path / "bad.jsonl")]}
    status, document = user.run(
        "train", user.recipe("r", eval={"every_steps": 2, "tasks_every_steps": 2, "tasks": [task]})
    )
    assert status == 4
    assert "bad.jsonl" in json.dumps(document["findings"])
