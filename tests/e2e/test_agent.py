"""GRPO with tools as a user runs it. The model is random, so a test says which of its turns are calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ftcli.assets import asset
from ftcli.data.tool_talk import ToolTalk, Turn
from ftcli.run.completions import Completions
from tests.e2e.conftest import User

ENVIRONMENT = '''
class Box:
    """A box that counts what was put into it."""

    def reset(self, answer, **row):
        self.put = []
        return " please"

    def calc(self, text: str) -> str:
        """Puts.

        Args:
            text: What.
        """
        if text == "bad":
            raise ValueError("not that")
        self.put.append(text)
        return f"put {text}"

    def get_reward(self):
        return len(self.put) + 0.01 * sum(map(len, self.put))
'''
GRPO: dict[str, Any] = {
    "num_generations": 4, "max_prompt_length": 70, "max_completion_length": 100, "temperature": 1.5,
    "stop_strings": list("aeiouAEIOU05"), "num_iterations": 2, "beta": 0.05,
}  # fmt: skip


@pytest.fixture
def acting(narrow: User, monkeypatch: pytest.MonkeyPatch) -> User:
    """A user with an environment; a turn of an even number of tokens calls it, with a failure now and then."""
    (narrow.folder / "box.py").write_text(ENVIRONMENT, encoding="utf-8")

    def turn(self: ToolTalk, tokens: Sequence[int], before: Sequence[int]) -> Turn:
        if len(tokens) % 2:
            return Turn(())
        return Turn((("calc", {"text": "bad" if len(tokens) % 8 == 0 else "x" * len(tokens)}),))

    monkeypatch.setattr(ToolTalk, "turn", turn)
    return narrow


def recipe(user: User, **change: Any) -> str:
    grpo = {**GRPO, "environment": {"file": str(user.folder / "box.py") + ":Box"}, **change.pop("grpo", {})}
    # Each completion has an environment, which is a process of its own.
    train = {"max_steps": change.pop("steps", 1), "gradient_accumulation_steps": 1}
    train["per_device_train_batch_size"] = change.pop("completions", 4)
    template = str(asset("models", "tiny-agent") / "chat_template.jinja")
    data = {
        "train": [{"path": "bundled:smoke-agent-train", "max_rows": 12}], "eval": [], "chat_template": template,
        "max_seq_len": 200,
    }  # fmt: skip
    return user.recipe("r", train=train, grpo=grpo, data=data, checkpoint={"every_steps": 1, "keep_last": 9}, **change)


def test_rollouts_act_are_rewarded_and_go_on_alike(acting: User) -> None:
    """A checkpoint lies between two uses of the same rollouts."""
    path = recipe(acting, steps=4, completions=8)
    acting.done("grpo", path)
    lines = [line for line in acting.metrics("r") if "loss" in line]
    assert any(line["tools/call_frequency"] > 0 for line in lines if "tools/call_frequency" in line)
    assert any(line["completions/turns"] > 1 for line in lines if "completions/turns" in line)
    assert any(line["tools/failure_frequency"] > 0 for line in lines if "tools/failure_frequency" in line)
    assert any(line["rewards/Box/mean"] > 0 for line in lines if "rewards/Box/mean" in line)
    assert any(line["grad_norm"] > 0 for line in lines)
    said = Completions(acting.folder / "r" / "completions").read(1)
    called = [one for one in said if "put x" in one.text]
    assert called
    assert all("<start_of_turn>tool\nput x" in one.text for one in called)
    assert all(one.rewards["Box"] >= 1 for one in called)
    assert all("please<end_of_turn>" in one.prompt and "calc(text)" in one.prompt for one in said)
    run = acting.folder / "r"
    for later in ("step-00000004", "step-00000002"):  # from the middle of a rollout: after the first of two passes
        for folder in (run / "checkpoints").glob("step-*"):
            if folder.name >= later:
                for file in sorted(folder.rglob("*"), reverse=True):
                    file.unlink() if file.is_file() else file.rmdir()
                folder.rmdir()
    acting.goes_on_alike("r", path, "grpo")


def test_a_reward_function_looks_at_environments_as_trls_do(acting: User) -> None:
    (acting.folder / "score.py").write_text(
        "def score(environments, **more):\n    return [10.0 * len(one.put) for one in environments]\n"
        "def plain(completions, prompts, answer):\n    return [0.0] * len(completions)\n"
    )
    rewards = [{"file": f"{acting.folder}/score.py:{name}"} for name in ("score", "plain")]
    acting.done("grpo", recipe(acting, grpo={"rewards": rewards}))
    (line,) = (line for line in acting.metrics("r") if "reward" in line)
    assert line["rewards/score/mean"] > 0
    for one in Completions(acting.folder / "r" / "completions").read(1):
        assert one.rewards["score"] == 10 * int(one.rewards["Box"])


def test_a_run_without_lockstep_is_a_run(acting: User, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftcli.methods.grpo import draws

    opened = draws.open_acting

    def at_once(job: Any, grpo: Any) -> Any:
        from dataclasses import replace

        found = opened(job, grpo)
        return None if found is None else replace(found, lockstep=False)

    monkeypatch.setattr(draws, "open_acting", at_once)
    acting.done("grpo", recipe(acting))
    assert any(line.get("tools/call_frequency", 0) > 0 for line in acting.metrics("r"))


@pytest.mark.parametrize(
    ("source", "status", "code", "said"),
    [
        (None, 2, "FT451", "no file at"),
        ("class Other: ...\n", 2, "FT451", "defines no class Box"),
        ("class Box:\n    def tool(self): ...\n", 2, "FT452", "without a method reset"),
        ("class Box:\n    def reset(self): ...\n    def get_reward(self): ...\n", 4, "FT472", "unexpected keyword"),
        (
            "class Box:\n    def reset(self, **row): return 'x' * 99\n    def get_reward(self): return 1\n",
            4, "FT472", "a prompt of",
        ),
        ("class Box:\n    def reset(self, **row): return None\n", 2, "FT263", "nothing is rewarded"),
        (
            "class Box:\n    def reset(self, **row): return None\n    def get_reward(self): raise OSError('broken')\n",
            4, "FT455", "OSError: broken",
        ),
    ],
)  # fmt: skip
def test_environments_that_cannot_be_acted_in(
    source: str | None, status: int, code: str, said: str, acting: User
) -> None:
    path = acting.folder / "box.py"
    path.unlink() if source is None else path.write_text(source, encoding="utf-8")
    found, document = acting.run("grpo", recipe(acting))
    assert found == status
    assert [one["code"] for one in document["findings"] if one["code"] == code and said in one["message"]]


def test_a_template_without_tools_is_refused(acting: User) -> None:
    change = {"data": {"chat_template": "gemma"}}
    text = Path(recipe(acting)).read_text(encoding="utf-8")
    words = [f"--set=data.chat_template={change['data']['chat_template']}"]
    (acting.folder / "again.yaml").write_text(text, encoding="utf-8")
    status, document = acting.run("grpo", str(acting.folder / "again.yaml"), *words)
    assert status == 2
    assert "FT473" in [one["code"] for one in document["findings"]]


def test_a_changed_environment_is_another_input(acting: User) -> None:
    path = recipe(acting, steps=2)
    acting.done("grpo", path)
    acting.cut_off("r")
    (acting.folder / "box.py").write_text(ENVIRONMENT + "\n# changed\n", encoding="utf-8")
    status, document = acting.run("grpo", path)
    assert status != 0
    assert "FT721" in [one["code"] for one in document["findings"]]
    assert json.dumps(document)
