"""`ftcli check` looks at rows as `train`, `grpo` and `eval` do, where that is quick, and says what it looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.pipeline import checking
from tests.e2e.conftest import User

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
GOOD = {"messages": CHAT}
SYSTEM = {"messages": [{"role": "system", "content": "s"}, *CHAT]}
LONG = {"messages": [{"role": "user", "content": "q" * 100}, CHAT[1]]}
GRPO: dict[str, Any] = {
    "num_generations": 4,
    "max_prompt_length": 48,
    "max_completion_length": 4,
    "rewards": [{"use": "regex", "pattern": "[0-4]"}],
}


def rows(path: Path, *fields: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in fields))
    return str(path)


def errors(answer: tuple[int, dict[str, Any]]) -> tuple[int, list[tuple[str, int | None]]]:
    status, document = answer
    return status, [(f["code"], f["line"]) for f in document["findings"] if f["severity"] == "error"]


@pytest.mark.parametrize(("row", "code"), [(SYSTEM, "FT425"), (LONG, "FT431")])
@pytest.mark.parametrize("number", [3, 300])
def test_check_refuses_what_train_refuses(user: User, row: dict[str, Any], code: str, number: int) -> None:
    path = rows(user.folder / "d.jsonl", *[GOOD] * (number - 1), row, GOOD)
    recipe = user.recipe(data={"train": [path], "eval": []})
    checked, trained = errors(user.run("check", recipe)), errors(user.run("train", recipe))
    assert checked == trained == (4, [(code, number)])


def test_check_refuses_held_out_rows_tasks_and_prompts_together(user: User) -> None:
    held = rows(user.folder / "e.jsonl", GOOD, LONG)
    task = rows(user.folder / "t.jsonl", GOOD, GOOD, SYSTEM)
    recipe = user.recipe(data={"eval": [held]}, eval={"tasks": [{"data": [task]}]})
    assert errors(user.run("check", recipe)) == (4, [("FT431", 2), ("FT425", 3)])
    asked = rows(user.folder / "p.jsonl", {"prompt": "q"}, {"prompt": "q" * 100})
    change: dict[str, Any] = {"train": {"per_device_train_batch_size": 4, "max_steps": 1}, "grpo": GRPO}
    recipe = user.recipe("g", data={"train": [asked], "eval": []}, **change)
    assert errors(user.run("check", recipe)) == errors(user.run("grpo", recipe)) == (4, [("FT781", 2)])


def test_check_says_what_it_looked_at_and_the_run_does_not_do_it_again(user: User) -> None:
    recipe = user.recipe(eval={"tasks": [{"max_rows": 2}]}, train={"max_steps": 1})
    result = user.done("check", recipe)
    assert [(one["key"], one["rows"], one["whole"]) for one in result["rows"]] == [
        ("data.train", 40, True), ("data.eval", 6, True), ("eval.tasks", 2, True),
    ]  # fmt: skip
    assert not any("rows" in item["check"] for item in result["not_made"])


def test_what_there_was_no_time_for_is_listed(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows(user.folder / "d.jsonl", *[GOOD] * 600, SYSTEM)
    recipe = user.recipe(data={"train": [path, "bundled:smoke-eval"], "eval": []})
    monkeypatch.setattr(checking, "SECONDS", 1e-9)
    result = user.done("check", recipe)
    assert [(one["rows"], one["whole"]) for one in result["rows"]] == [(0, False), (0, False)]
    reasons = [item["reason"] for item in result["not_made"] if item["check"].startswith("rows as tokens")]
    assert len(reasons) == 2
    assert all("none was" in reason for reason in reasons)


def test_a_tokenizer_that_is_not_here_is_said(user: User) -> None:
    recipe = user.recipe(model={"name_or_path": "google/gemma-2-2b-it", "dtype": "auto"})
    result = user.done("check", recipe, "--as", "h100")
    reason = next(item["reason"] for item in result["not_made"] if item["check"] == "rows as tokens")
    assert "the tokenizer of google/gemma-2-2b-it is not on this machine" in reason
    assert result["rows"] == []


def test_check_says_what_export_will_refuse(user: User) -> None:
    pytest.importorskip("gguf")
    template = user.folder / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    recipe = user.recipe(data={"chat_template": str(template)}, export={"formats": ["adapter", "ollama"]})
    findings = user.run("check", recipe)[1]["findings"]
    assert [(f["code"], f["severity"]) for f in findings if f["code"] == "FT759"] == [("FT759", "note")]
    recipe = user.recipe(export={"formats": ["adapter", "ollama"]})
    assert not [f for f in user.run("check", recipe)[1]["findings"] if f["code"] == "FT759"]


@pytest.mark.parametrize("method", ["dpo", "kto", "reward", "sft"])
def test_rows_that_are_too_many_to_be_compared_are_told(
    user: User, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """A pair that also stands there the other way round is found below the limit, and above it nothing is claimed."""
    pair = {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "b"}]}
    turned = {**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]}
    path = rows(user.folder / "d.jsonl", *([GOOD, GOOD] if method == "sft" else [pair, turned]))
    recipe = user.recipe(
        data={"train": [path], "eval": []}, train={"method": method, "learning_rate": 1e-5}, eval={"every_steps": None}
    )
    code = {"kto": "FT467"}.get(method, "FT458")
    found = {}
    for most in (4, 3):
        monkeypatch.setattr(checking, "_MOST_ROWS", most if method != "sft" else most - 3)
        status, document = user.run("check", recipe)
        assert status == 0, document
        not_made = [one["reason"] for one in document["result"]["not_made"] if one["check"].startswith("rows compared")]
        found[most] = [finding["code"] for finding in document["findings"]].count(code) > 0, not_made
    told = "there are 4, and more than 3 take too long here; the run compares all"
    assert found == {4: (method != "sft", []), 3: (False, [] if method == "sft" else [told])}


def test_a_file_that_is_trained_on_and_held_out_is_told(user: User) -> None:
    path = rows(user.folder / "d.jsonl", GOOD)
    status, document = user.run("check", user.recipe(data={"train": [path], "eval": [path]}))
    assert status == 0
    assert [finding["message"] for finding in document["findings"] if finding["code"] == "FT468"] == [
        "1 of 1 held-out texts are trained on as well, such as this one"
    ]
