"""What a recipe says holds in every command that reads it: nothing is dropped on one of the ways."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.run import status as run_status
from ftcli.train import lifecycle
from tests.e2e.conftest import User

GRPO: dict[str, Any] = {
    "num_generations": 4,
    "max_prompt_length": 48,
    "max_completion_length": 4,
    "rewards": [{"use": "regex", "pattern": "[0-4]"}],
}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def rows(path: Path, *fields: dict[str, Any] | str) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in fields))
    return str(path)


def refusal(answer: tuple[int, dict[str, Any]]) -> tuple[int, str, str]:
    status, document = answer
    error = next(finding for finding in document["findings"] if finding["severity"] == "error")
    return status, error["code"], error["message"]


@pytest.mark.parametrize("way", ["train", "grpo", "a task"])
def test_offline_asks_no_network_whoever_reads_the_rows(user: User, way: str) -> None:
    hub = [{"path": "hub:nobody/nothing"}]
    if way == "a task":
        answer = user.run("eval", user.recipe(eval={"tasks": [{"data": hub}]}))
    elif way == "grpo":
        answer = user.run("grpo", user.recipe(data={"train": hub, "eval": []}, grpo=GRPO, train={"max_steps": 1}))
    else:
        answer = user.run("train", user.recipe(data={"train": hub}))
    status, code, message = refusal(answer)
    assert (status, code) == (4, "FT406")
    assert "told to use no network" in message


def test_grpo_and_tasks_skip_broken_rows_as_train_does(user: User) -> None:
    good = {"prompt": "pick 1", "answer": "1"}
    path = rows(user.folder / "p.jsonl", good, "{", good, {"prompt": 5, "answer": "1"}, good, good)
    train = {"max_steps": 1, "per_device_train_batch_size": 4}
    data = {"train": [path], "eval": []}
    assert refusal(user.run("grpo", user.recipe(data=data, grpo=GRPO, train=train)))[:2] == (4, "FT403")
    recipe = user.recipe(data={**data, "max_bad_rows": 2}, grpo=GRPO, train=train, eval={"tasks": [{"data": [path]}]})
    status, document = user.run("grpo", recipe)
    assert status == 0, document["findings"]
    skipped = [f["message"] for f in document["findings"] if f["code"] == "FT441"]
    assert len(skipped) == 2, "one for data.train, one for the task"
    assert all("2 of 6 rows are broken and skipped" in message for message in skipped)
    result = user.done("eval", recipe, "--set", "data.eval=[bundled:smoke-eval]", "--set", "data.train=[]")
    assert result["base"]["tasks"]["exact_match"]["rows"] == 4


def test_long_prompts_of_tasks_are_treated_as_overlong_says_before_the_model_is_loaded(user: User) -> None:
    path = rows(user.folder / "t.jsonl", {"prompt": "q", "answer": "a"}, {"prompt": "x" * 5000, "answer": "a"})
    change = {"eval": {"tasks": [{"data": [path]}]}}
    status, code, message = refusal(user.run("eval", user.recipe(**change)))
    assert (status, code) == (4, "FT431")
    assert "no room for an answer in data.max_seq_len 64" in message
    for overlong, judged in (("drop", 1), ("truncate", 2)):
        result = user.done("eval", user.recipe(**change, data={"overlong": overlong}))
        assert result["base"]["tasks"]["exact_match"]["rows"] == judged


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_two_ctrl_c_never_leave_a_run_that_says_it_is_running(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first while a phase goes on, the second while the report of the end is written."""

    def first(*_: object) -> None:
        interrupt()

    def second(*args: object) -> None:
        interrupt()
        lifecycle_report(*args)

    lifecycle_report = lifecycle.write_report
    monkeypatch.setattr(lifecycle, "_write_manifest", first)
    monkeypatch.setattr(lifecycle, "write_report", second)
    status, document = user.run("train", user.recipe())
    assert (status, document["findings"][-1]["code"]) == (130, "FT728")
    written = json.loads((user.folder / "r" / "status.json").read_text())
    assert (written["state"], written["exit_code"]) == ("preempted", 130)
    assert (user.folder / "r" / "report.html").is_file()


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_right_after_a_run_says_it_is_running(user: User, monkeypatch: pytest.MonkeyPatch, signals: int) -> None:
    begin = run_status.begin

    def begun(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        for _ in range(signals):
            interrupt()

    monkeypatch.setattr(run_status, "begin", begun)
    status, _ = user.run("train", user.recipe())
    assert status == 130
    written = json.loads((user.folder / "r" / "status.json").read_text())
    assert (written["state"], written["exit_code"]) == ("preempted", 130)
    monkeypatch.setattr(run_status, "begin", begin)
    assert user.done("train", user.recipe())["steps"] == 6


def test_a_reward_that_leaves_the_folder_does_not_move_the_run(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user.folder)
    away = user.folder / "away"
    away.mkdir()
    mine = user.folder / "mine.py"
    mine.write_text(
        f"import os\nos.chdir({str(away)!r})\n\n\ndef score(completions, prompts, **kw):\n"
        f"    os.chdir({str(away)!r})\n    return [float(len(c)) for c in completions]\n"
    )
    rows(user.folder / "p.jsonl", *[{"prompt": f"pick {n}", "answer": "1"} for n in range(8)])
    recipe = user.recipe(
        run={"output_dir": "here"}, data={"train": ["p.jsonl"], "eval": ["p.jsonl"]},
        train={"max_steps": 2, "per_device_train_batch_size": 4},
        checkpoint={"every_steps": 1}, logging={"every_steps": 1},
        grpo={**GRPO, "rewards": [{"file": "mine.py:score"}]}, eval={"tasks": [{"file": "mine.py:score"}]},
    )  # fmt: skip
    assert user.done("grpo", recipe)["steps"] == 2
    assert list(away.iterdir()) == []
    assert {"adapter", "checkpoints", "status.json", "report.html"} <= {
        p.name for p in (user.folder / "here").iterdir()
    }


@pytest.mark.parametrize(
    ("poisoned", "said"), [("weights", "logits are not finite"), ("loss", "the loss is nan at step 2")]
)
def test_grpo_that_diverges_ends_with_6_and_keeps_no_checkpoint_of_it(
    user: User, monkeypatch: pytest.MonkeyPatch, poisoned: str, said: str
) -> None:
    from ftcli.methods.grpo.objective import GrpoObjective
    from ftcli.train.loop import TrainingLoop

    begin = GrpoObjective.begin

    def begin_step(self: GrpoObjective, step: int) -> None:
        begin(self, step)
        if step == 1:
            weight = next(p for p in self._policy.model.parameters() if p.requires_grad)
            with torch.no_grad():
                weight.fill_(math.nan) if poisoned == "weights" else None

    loss_of = TrainingLoop._watch

    def watch(self: TrainingLoop, name: str, value: torch.Tensor, rows: tuple[int, ...]) -> None:
        nan = poisoned == "loss" and name == "the loss" and self.step == 1
        loss_of(self, name, value * math.nan if nan else value, rows)

    monkeypatch.setattr(GrpoObjective, "begin", begin_step)
    monkeypatch.setattr(TrainingLoop, "_watch", watch)
    path = rows(user.folder / "p.jsonl", *[{"prompt": f"pick {n}", "answer": "1"} for n in range(8)])
    recipe = user.recipe(
        data={"train": [path], "eval": []},
        train={"max_steps": 6, "per_device_train_batch_size": 4},
        checkpoint={"every_steps": 1},
        grpo=GRPO,
    )
    status, document = user.run("grpo", recipe)
    assert (status, document["findings"][-1]["code"]) == (6, "FT702"), document["findings"]
    assert said in document["findings"][-1]["message"]
    assert json.loads((user.folder / "r" / "status.json").read_text())["exit_code"] == 6
    assert [p.name for p in (user.folder / "r" / "checkpoints").glob("step-*")] == ["step-00000001"]


def test_nothing_pretends_to_change_what_was_trained_and_an_export_says_when_the_recipe_did(stored: User) -> None:
    user = stored
    recipe = user.recipe(train={"max_steps": 1})
    user.done("train", recipe)
    for target in (recipe, str(user.folder / "r")):
        changes = ["--set", "lora.alpha=64", "--set", "data.chat_template=chatml", "--set", "export.formats=[adapter]"]
        status, document = user.run("export", target, *changes)
        refused = [finding["message"] for finding in document["findings"] if finding["code"] == "FT749"]
        assert (status, len(refused)) == (2, 2), document["findings"]
        assert "an export cannot change lora.alpha: " in refused[0]
        assert not (user.folder / "r" / "export").exists()
    for command in (("eval", recipe, "--run", str(user.folder / "r")), ("chat", recipe, "--prompt", "hi")):
        status, document = user.run(*command, "--set", "lora.alpha=64", "--set", "train.learning_rate=1")
        refused = [finding["message"] for finding in document["findings"] if finding["code"] == "FT749"]
        assert (status, len(refused)) == (2, 2), document["findings"]
        assert "cannot change lora.alpha: " in refused[0]
        done = user.run(*command, "--set", "lora.r=4", "--set", "eval.generate.max_new_tokens=2")
        assert done[0] == 0, "the run's own value is no change"
    status, document = user.run("export", recipe, "--set", "export.formats=[adapter]", "--set", "lora.r=4")
    assert status == 0
    assert "FT749" not in [f["code"] for f in document["findings"]], "the value of the run is no change"
    user.recipe(train={"max_steps": 1, "learning_rate": 5e-4}, lora={"alpha": 64})
    status, document = user.run("export", recipe, "--set", "export.formats=[adapter]")
    warned = [(f["code"], f["severity"]) for f in document["findings"] if f["severity"] != "note"]
    assert (status, warned) == (0, [("FT749", "warning")] * 2)


def test_grpo_has_its_scores_before_training_after_a_resume(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli.methods.grpo.objective import GrpoObjective

    path = rows(user.folder / "p.jsonl", *[{"prompt": f"pick {n}", "answer": str(n)} for n in range(8)])
    recipe = user.recipe(
        data={"train": [path], "eval": []},
        train={"max_steps": 3, "per_device_train_batch_size": 4},
        grpo=GRPO,
        eval={"tasks": [{"use": "regex", "pattern": "[aeiou]", "data": [path]}]},
    )
    end = GrpoObjective.end

    def stopped(self: GrpoObjective, step: int) -> None:
        end(self, step)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(GrpoObjective, "end", stopped)
        assert user.run("grpo", recipe)[0] == 75
    first = json.loads((user.folder / "r" / "eval.json").read_text())
    assert first["base"]["tasks"][0]["count"] == 8
    shutil.copytree(user.folder / "r", user.folder / "copy")
    resumed = user.done("grpo", recipe)
    assert resumed["before"] == {"regex": first["base"]["tasks"][0]["value"]}
    assert set(resumed["after"]) == {"regex"}
    written = json.loads((user.folder / "r" / "eval.json").read_text())
    assert written["base"] == first["base"]
    (checkpoint,) = (user.folder / "copy" / "checkpoints").glob("step-*")
    elsewhere = user.done("grpo", recipe, "--resume", str(checkpoint), "--output-dir", str(user.folder / "new"))
    assert elsewhere["before"] == resumed["before"]
