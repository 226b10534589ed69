"""Reasoning is no part of the answer, from generation to the files; and rewards are inputs of a run."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ftcli.cli.app import main
from ftcli.evaluate import generate as generation
from ftcli.evaluate.generate import CompletionEnd
from ftcli.run.completions import Completions
from tests.e2e.conftest import User
from tests.e2e.test_grpo_settings import DATA, GRPO

#: The generation prompt opens the reasoning, which a random model never ends.
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
REWARD = (
    "def score(completions, prompts, completion_reasoning, **columns):\n"
    "    assert completions == [''] * len(prompts), completions\n"
    "    return [float(len(text)) for text in completion_reasoning]\n"
)


def thinking(user: User, **change: Any) -> str:
    """A recipe whose model thinks until it is cut off."""
    (user.folder / "t.jinja").write_text(TEMPLATE)
    ask = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "7"}]} for n in range(8)
    ]
    (user.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ask))
    rows = str(user.folder / "rows.jsonl")
    data = {"train": [rows], "eval": [rows], "chat_template": str(user.folder / "t.jinja")}
    tasks = [{"use": "length", "name": "nothing", "max_chars": 0}, {"use": "regex", "name": "any", "pattern": "."}]
    evaluated = {"tasks": tasks, "generate": {"max_new_tokens": 3}}
    return user.recipe("r", data=data, eval=evaluated, **change)


def test_evaluation_judges_and_shows_answers_without_their_reasoning(narrow: User) -> None:
    recipe = thinking(narrow, train={"max_steps": 1})
    narrow.done("train", recipe)
    samples = json.loads((narrow.folder / "r" / "eval.json").read_text())["samples"]
    assert samples
    assert all(row["after"] == "" and row["after_reasoning"] is not None for row in samples)
    result = narrow.done("eval", recipe, "--run", str(narrow.folder / "r"))
    for side in ("base", "run"):
        scores = {name: task["score"] for name, task in result[side]["tasks"].items()}
        assert scores == {"nothing": 1.0, "any": 0.0}
        task = result[side]["tasks"]["any"]
        assert (task["cut"], task["cut_reasoning"]) == (8, 8)
        assert all(row["completion"] == "" and row["reasoning"] is not None for row in task["samples"])
    written = json.loads((narrow.folder / "r" / "eval.json").read_text())
    assert {task["cut"] for side in ("base", "run") for task in written[side]["tasks"]} == {8}
    page = (narrow.folder / "r" / "report.html").read_text()
    assert "ny, 8 rows; answers cut off: 8, then 8" in page
    assert '<summary class="soft">Reasoning</summary>' in page


def test_rewards_get_answers_and_their_reasoning_apart(narrow: User) -> None:
    (narrow.folder / "mine.py").write_text(REWARD)
    grpo = {**GRPO, "rewards": [{"file": f"{narrow.folder}/mine.py:score"}, {"use": "length", "max_chars": 0}]}
    recipe = thinking(narrow, train={"max_steps": 2, "gradient_accumulation_steps": 1}, grpo=grpo)
    narrow.done("grpo", recipe)
    kept = Completions(narrow.folder / "r" / "completions")
    for one in [one for step in kept.steps() for one in kept.read(step)]:
        assert one.text == ""
        assert one.reasoning is not None
        assert one.rewards == {"score": float(len(one.reasoning)), "length": 1.0}


def eval_of(judge: str) -> dict[str, Any]:
    """A task of this judge."""
    return {"tasks": [{"use": judge, "name": "held", "max_rows": 2}], "generate": {"max_new_tokens": 2}}


def test_a_run_does_not_go_on_with_another_reward(narrow: User) -> None:
    file, schema = narrow.folder / "mine.py", narrow.folder / "schema.json"
    file.write_text("def score(completions, prompts, **columns):\n    return [len(text) for text in completions]\n")
    schema.write_text('{"type": "integer"}')
    rewards = [{"file": f"{file}:score"}, {"use": "json_valid", "json_schema": str(schema)}]
    train, grpo = {"max_steps": 4, "gradient_accumulation_steps": 1}, {**GRPO, "rewards": rewards}
    recipe = narrow.recipe(
        "r", train=train, grpo=grpo, data=DATA, checkpoint={"every_steps": 2}, eval=eval_of("exact_match")
    )
    narrow.done("grpo", recipe)
    names = [entry["name"] for entry in json.loads((narrow.folder / "r" / "manifest.json").read_text())["judges"]]
    assert names == [str(file), str(schema)]
    narrow.cut_off("r")
    for path, text in ((file, file.read_text().replace("len", "2 * len")), (schema, '{"type": "string"}')):
        before = path.read_text()
        path.write_text(text)
        status, document = narrow.run("grpo", recipe)
        (told,) = [one for one in document["findings"] if one["severity"] == "error"]
        assert (status, told["code"]) == (2, "FT721")
        assert f"a reward or judge has changed since this run began: {path} (" in told["message"]
        path.write_text(before)
    other = narrow.recipe(
        "r", train=train, grpo=grpo, data=DATA, checkpoint={"every_steps": 2}, eval=eval_of("contains")
    )
    status, document = narrow.run("grpo", other)
    assert status == 2
    told = document["findings"][-1]
    assert told["code"] == "FT721"
    changed = f"differs from that of the run in {narrow.folder / 'r'}: eval.tasks.0.use: exact_match -> "
    assert changed in told["message"]
    schema.write_text('{"type": "string"}')
    checkpoint = narrow.folder / "r" / "checkpoints" / "step-00000002"
    status, document = narrow.run("grpo", recipe, "--resume", str(checkpoint))
    assert status == 0, document["findings"]
    waived = [one["message"] for one in document["findings"] if one["code"] == "FT732"]
    assert ["eval.tasks.0.use: " in waived[0], f"judge: {schema} (" in waived[1], len(waived)] == [True, True, 2]


@pytest.mark.parametrize("command", ["train", "grpo"])
def test_a_run_does_not_go_on_with_other_held_out_rows(narrow: User, command: str) -> None:
    rows = [json.dumps({"prompt": f"mirror: {word}", "completion": word[::-1]}) for word in ("ab", "cd", "ef")]
    held, own = narrow.folder / "held.jsonl", narrow.folder / "own"
    own.mkdir()
    held.write_text("\n".join(rows))
    (own / "rows.jsonl").write_text(rows[0])
    data = {"train": DATA["train"], "eval": [str(held)]}
    tasks = [{"use": "contains", "name": "all"}, {"use": "length", "max_chars": 9, "data": [str(own)]}]
    recipe = narrow.recipe(
        "r",
        train={"max_steps": 4, "gradient_accumulation_steps": 1},
        data=data,
        checkpoint={"every_steps": 2},
        eval={"tasks": tasks, "generate": {"max_new_tokens": 2}},
        **({} if command == "train" else {"grpo": {**GRPO, "rewards": [{"use": "length", "max_chars": 9}]}}),
    )
    narrow.done(command, recipe)
    listed = json.loads((narrow.folder / "r" / "manifest.json").read_text())["held_out"]
    of_tasks = [] if command == "train" else [f"{own}/rows.jsonl"]  # `ftcli train` asks none
    assert [entry["name"] for entry in listed] == [str(held), *of_tasks]
    narrow.cut_off("r")
    for file in (held, *map(Path, of_tasks)):
        before = file.read_text()
        file.write_text(before.replace("ab", "ax"))
        status, document = narrow.run(command, recipe)
        (told,) = [one for one in document["findings"] if one["severity"] == "error"]
        assert (status, told["code"]) == (2, "FT731")
        assert f"held-out data has changed since this run began: {file} (" in told["message"]
        file.write_text(before)
    held.write_text(rows[0])
    checkpoint = narrow.folder / "r" / "checkpoints" / "step-00000002"
    status, document = narrow.run(command, recipe, "--resume", str(checkpoint))
    assert status == 0, document["findings"]
    waived = [one["message"] for one in document["findings"] if one["code"] == "FT732"]
    assert [message.partition("data: ")[2].partition(" (")[0] for message in waived] == [str(held)]


def test_a_reward_that_is_edited_meanwhile_stays_what_it_was(tmp_path: Path) -> None:
    from ftcli.config.evaluation import RewardConfig
    from ftcli.judges import CompletionBatch, open_judge

    file = tmp_path / "mine.py"
    body = (
        "import os\ndef score(completions, prompts):\n    if completions == ['die']: os._exit(1)\n    return [{}.0]\n"
    )
    file.write_text(body.format(1))
    judge = open_judge(RewardConfig(file=f"{file}:score", on_error="skip"))
    file.write_text(body.format(2))
    assert [judge.scores(CompletionBatch([each], ["p"])).values for each in ("a", "die", "a")] == [[1.0], [None], [1.0]]


def test_chat_tells_the_answer_from_its_reasoning(narrow: User, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = thinking(narrow, train={"max_steps": 1})
    words = ["chat", recipe, "--base", "--prompt", "1?", "--max-new-tokens", "24"]
    said = narrow.done(*words)  # a random model never ends it
    assert (said["completion"], said["stop"]) == ("", "max_new_tokens")
    assert said["reasoning"]
    assert narrow.done(*words, "--raw")["reasoning"] is None

    def told(_: Any, tokenizer: Any, *__: Any, **___: Any) -> Generator[str, None, CompletionEnd]:
        text = "Six sevens.</think>\n\n42"
        yield text
        return CompletionEnd(9, "stop", tuple(tokenizer(text, add_special_tokens=False)["input_ids"]))

    monkeypatch.setattr(generation, "stream", told)
    said = narrow.done(*words)
    assert (said["completion"], said["reasoning"]) == ("42", "Six sevens.")
    assert narrow.done(*words, "--raw")["completion"] == "Six sevens.</think>\n\n42"
    assert main([*words, "--offline", "--quiet"]) == 0
    assert narrow.capture.readouterr().out == "42\n"
