"""`ftcli sample` as a user meets it: answers become rows that train as they are, and a stopped run goes on alike."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ftcli.cli.app import main
from ftcli.pipeline.sample_answers import Sampler
from tests.e2e.conftest import User
from tests.tiers import further

RECIPES = Path(__file__).parents[2] / "recipes"
LENGTHS = "def score(completions, prompts, **columns):\n    return [len(text) / 8 for text in completions]\n"
#: Answers of a random model hardly ever end, and are all different.
LOOSE = ("--truncated", "keep", "--seed", "5")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def refusal(answer: tuple[int, dict[str, Any]]) -> tuple[int, str, str]:
    status, document = answer
    error = next(finding for finding in document["findings"] if finding["severity"] == "error")
    return status, error["code"], error["message"]


@pytest.fixture
def user(narrow: User, monkeypatch: pytest.MonkeyPatch) -> User:
    """What is asked here does not depend on what the model knows."""
    monkeypatch.chdir(narrow.folder)
    return narrow


def judged(user: User, source: str = LENGTHS, **change: Any) -> str:
    """A recipe of four prompts whose answers a function judges."""
    (user.folder / "mine.py").write_text(source)
    tasks = [{"file": "mine.py:score", "name": "mine"}]
    settings: dict[str, Any] = {
        "data": {"train": [{"path": "bundled:smoke-train", "max_rows": 4}], "eval": []},
        "eval": {"tasks": tasks, "generate": {"max_new_tokens": 5}, "per_device_eval_batch_size": 128},
    }
    return user.recipe("r", **{**settings, **change})


def files_of(folder: Path) -> dict[str, bytes]:
    """What a run has written, but who held the lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_rejection_sampling_then_dpo_are_two_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared_clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    user, recipe = User(tmp_path, capsys), str(RECIPES / "smoke-dpo.yaml")
    drawn = user.done("sample", recipe, "--max-prompts", "250")
    assert drawn["pass_at_1"] < 0.4 < 0.6 < drawn["pass_at_n"]
    assert drawn["mean_score"] == drawn["pass_at_1"]
    assert drawn["pairs"]["path"] == "samples/smoke-dpo/pairs.jsonl"
    assert drawn["pairs"]["rows"] + sum(drawn["pairs"]["left_out"].values()) == 250
    for row in rows_in(tmp_path / "samples" / "smoke-dpo" / "pairs.jsonl"):
        digits = row["prompt"][0]["content"].removeprefix("pick: ").split()
        assert row["chosen"][0]["content"] == max(digits) != row["rejected"][0]["content"]
        assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)
    short = ("train.max_steps=45", "train.per_device_train_batch_size=8", "data.train=[samples/smoke-dpo/pairs.jsonl]")
    words = [f"--set={setting}" for setting in (*short, "data.eval=[{path: 'bundled:smoke-dpo-eval', max_rows: 60}]")]
    user.done("train", recipe, "--output-dir", "run", *words)
    found = user.done("eval", recipe, "--run", "run", *words)
    base, run = found["base"], found["run"]
    assert base["accuracy"] == 0.5
    assert run["accuracy"] >= 0.9
    assert run["tasks"]["exact_match"]["score"] > base["tasks"]["exact_match"]["score"] + 0.2


def test_rows_train_without_editing(user: User) -> None:
    recipe = judged(user)
    drawn = user.done("sample", recipe, *LOOSE, "-n", "6", "--per-prompt", "2", "--output", "out")
    assert (drawn["prompts"], drawn["answers"], drawn["least_score"]) == (4, 24, None)
    assert drawn["sft"]["rows"] == 8
    assert drawn["pairs"]["rows"] >= 4
    assert drawn["sampling"] == {
        "num_generations": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 5, "stop_strings": [],
        "seed": 5, "max_length": 64,
    }  # fmt: skip
    scores = [row["scores"] for row in rows_in(user.folder / "out" / "scores.jsonl")]
    assert drawn["mean_score"] == pytest.approx(sum(map(sum, scores)) / 24)
    assert drawn["mean_best_score"] == pytest.approx(sum(map(max, scores)) / 4)
    best = rows_in(user.folder / "out" / "sft.jsonl")
    assert [row["score"] for row in best[::2]] == [max(each) for each in scores]
    sft = user.recipe("sft", data={"train": ["out/sft.jsonl"]}, train={"max_steps": 2})
    user.done("train", sft)
    pairs = {"train": ["out/pairs.jsonl"], "eval": ["out/pairs.jsonl"]}
    user.done("train", user.recipe("dpo", data=pairs, train={"method": "dpo", "max_steps": 2}, eval={"samples": 0}))


@pytest.mark.parametrize("number", [signal.SIGINT, *further(signal.SIGTERM)])
def test_a_stopped_run_goes_on_alike(user: User, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    recipe, words = judged(user), [*LOOSE, "-n", "512"]  # two prompts at a time
    user.done("sample", recipe, *words, "--output", "whole")
    draw, turns = Sampler.draw, []

    def stopped(self: Sampler, *args: Any) -> Any:
        turns.append(args[0])
        if len(turns) == 2:
            os.kill(os.getpid(), number)
        return draw(self, *args)

    monkeypatch.setattr(Sampler, "draw", stopped)
    status, document = user.run("sample", recipe, *words, "--output", "cut")
    assert (status, document["findings"][-1]["code"]) == ({"SIGINT": 130, "SIGTERM": 75}[number.name], "FT728")
    assert not (user.folder / "cut" / "sft.jsonl").exists()
    assert user.done("sample", recipe, *words, "--output", "cut")["answers"] == 2048
    assert turns == [range(2), range(2, 4), range(2, 4)], "no prompt was answered twice"
    whole, cut = files_of(user.folder / "whole"), files_of(user.folder / "cut")
    assert whole.pop("sample.json").replace(b"whole/", b"cut/") == cut.pop("sample.json")
    assert whole == cut


def test_answers_are_judged_again_without_being_drawn_again(user: User) -> None:
    recipe, words = judged(user, LENGTHS.replace("len(text) / 8", "1 / 0")), [*LOOSE, "--output", "out"]
    status, code, message = refusal(user.run("sample", recipe, *words))
    assert (status, code) == (4, "FT765")
    assert "ZeroDivisionError" in message
    answers = (user.folder / "out" / "answers.jsonl").read_bytes()
    assert answers
    first = user.done("sample", judged(user), *words)
    assert first["tokens_per_second"] is None
    other = user.done("sample", judged(user, LENGTHS.replace("len(text)", "-len(text)")), *words)
    assert other["mean_score"] == -first["mean_score"]
    assert (user.folder / "out" / "answers.jsonl").read_bytes() == answers
    narrower = user.done("sample", judged(user), *words, "--as", "pairs", "--min-margin", "100")
    assert narrower["pairs"]["left_out"] == {"below the least margin": 4}
    assert "sft" not in narrower


@pytest.mark.parametrize("wrong", [[1e999], [None, None], *further(["1"], [True], 7)])
def test_damaged_scores_are_judged_again(user: User, wrong: Any) -> None:
    recipe = judged(user)
    user.done("sample", recipe, *LOOSE, "-n", "1", "--as", "sft", "--output", "out")
    before = files_of(user.folder / "out")
    path = user.folder / "out" / "scores.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], json.dumps({**json.loads(lines[3]), "scores": wrong})]) + "\n")
    user.done("sample", recipe, *LOOSE, "-n", "1", "--as", "sft", "--output", "out")
    assert files_of(user.folder / "out") == before


HOSTILE = ('{"text": 5}', '{"text": "", "whole": "", "truncated": 1, "tokens": 1}', "[]", '"x"')


@pytest.mark.parametrize("answer", [*HOSTILE[:2], *further(*HOSTILE[2:])])
def test_damaged_answers_are_drawn_again(user: User, answer: str) -> None:
    recipe = judged(user)
    user.done("sample", recipe, *LOOSE, "-n", "1", "--as", "sft", "--output", "out")
    before = files_of(user.folder / "out")
    path = user.folder / "out" / "answers.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    path.write_text("\n".join([json.dumps({**first, "answers": [json.loads(answer)]}), *lines[1:]]) + "\n")
    user.done("sample", recipe, *LOOSE, "-n", "1", "--as", "sft", "--output", "out")
    assert files_of(user.folder / "out") == before


def test_a_folder_of_something_else_is_refused(user: User) -> None:
    recipe = judged(user)
    user.done("sample", recipe, *LOOSE, "--output", "out")
    before = files_of(user.folder / "out")
    status, code, message = refusal(user.run("sample", recipe, *LOOSE, "-n", "4", "--output", "out"))
    assert (status, code) == (2, "FT773")
    assert "num_generations: 8 -> 4" in message
    assert files_of(user.folder / "out") == before
    train = [{"path": "bundled:smoke-eval", "max_rows": 4}]
    other = judged(user, data={"train": train, "eval": []})
    assert refusal(user.run("sample", other, *LOOSE, "--output", "out"))[:2] == (2, "FT773")
    assert user.done("sample", other, *LOOSE, "--output", "out", "--force")["prompts"] == 4
    assert files_of(user.folder / "out") != before


def test_a_run_answers_in_place_of_its_base(user: User) -> None:
    recipe = judged(user, train={"max_steps": 3, "learning_rate": 0.1}, checkpoint={"every_steps": 1})
    user.done("train", recipe)
    base = user.done("sample", recipe, *LOOSE, "--output", "base")
    run = user.done("sample", recipe, *LOOSE, "--run", "r")
    assert (run["run"], run["folder"]) == ("r", "samples/r")
    before = sorted((user.folder / "r").rglob("*"))
    for folder in ("r", "r/../r", "r/checkpoints", "r/export/new"):
        status, code, message = refusal(user.run("sample", recipe, *LOOSE, "--output", folder, "--force"))
        assert (status, code) == (2, "FT773")
        assert "the folder of a run" in message
    assert sorted((user.folder / "r").rglob("*")) == before
    answers = {where: rows_in(Path(each["folder"]) / "answers.jsonl") for where, each in (("base", base), ("run", run))}
    assert answers["base"] != answers["run"]
    assert refusal(user.run("sample", recipe, *LOOSE, "--run", "r", "--checkpoint", "1"))[:2] == (2, "FT773")
    first = user.done("sample", recipe, *LOOSE, "--run", "r", "--checkpoint", "1", "--output", "first")
    assert first["checkpoint"].endswith("step-00000001")
    assert refusal(user.run("sample", recipe, "--run", "r", "--set", "train.max_steps=9"))[:2] == (2, "FT749")


def test_a_recipe_of_grpo_gives_its_own_settings_and_rewards(user: User) -> None:
    rewards = [{"use": "regex", "pattern": "[a-m]", "weight": 2.0}, {"use": "length", "max_chars": 2, "weight": 0.5}]
    grpo = {"num_generations": 5, "max_prompt_length": 48, "max_completion_length": 4, "temperature": 0.7}
    data = {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 3}], "eval": []}
    drawn = user.done("sample", user.recipe(data=data, grpo={**grpo, "rewards": rewards}), "--truncated", "keep")
    assert drawn["judges"] == ["regex", "length"]
    assert drawn["least_score"] == 2.5
    sampling = drawn["sampling"]
    assert (sampling["num_generations"], sampling["temperature"], sampling["max_new_tokens"]) == (5, 0.7, 4)
    for row in rows_in(Path(drawn["folder"]) / "scores.jsonl"):
        parts = row["judges"]
        assert row["scores"] == [2 * a + b / 2 for a, b in zip(parts["regex"], parts["length"], strict=True)]


def test_rewards_that_fail_on_most_answers_stop_it(user: User) -> None:
    (user.folder / "mine.py").write_text(
        "def score(completions, prompts, **columns):\n    return ['?'] * len(prompts)\n"
    )
    rewards = [{"file": "mine.py:score", "on_error": "skip"}]
    grpo = {"num_generations": 8, "max_prompt_length": 48, "max_completion_length": 4, "rewards": rewards}
    data = {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 3}], "eval": []}
    assert refusal(user.run("sample", user.recipe(data=data, grpo=grpo)))[:2] == (4, "FT456")
    grpo = {**grpo, "reward_failures": {"max_fraction": 1.0}}
    status, document = user.run("sample", user.recipe(data=data, grpo=grpo))
    assert (status, document["result"]["not_judged"], document["result"]["mean_score"]) == (0, 24, None)
    assert sum(finding["code"] == "FT768" for finding in document["findings"]) == 1


def test_a_reward_model_scores(stored: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stored.folder)
    source, folder = stored.model["name_or_path"], stored.folder / "scores"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1, pad_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rewards = [{"use": "reward_model", "model": str(folder)}]
    grpo = {"num_generations": 4, "max_prompt_length": 48, "max_completion_length": 4, "rewards": rewards}
    data = {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 3}], "eval": []}
    drawn = stored.done("sample", stored.recipe(data=data, grpo=grpo), "--truncated", "keep", "--as", "pairs")
    assert (drawn["judges"], drawn["least_score"], drawn["pass_at_1"]) == (["reward_model"], None, None)
    pairs = rows_in(stored.folder / "samples" / "r" / "pairs.jsonl")
    assert len(pairs) == 3
    for row in pairs:
        for side in ("chosen", "rejected"):
            text = tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                score = model.eval()(input_ids=ids).logits.item()
            assert row[f"score_{side}"] == pytest.approx(score, abs=1e-4)
        assert row["score_chosen"] > row["score_rejected"]
    tasks = {"tasks": [{"use": "contains"}]}
    refused = stored.run("sample", stored.recipe("w", train={"method": "reward"}, eval=tasks))
    assert refusal(refused)[:2] == (3, "FT351"), "it writes no answers"


def test_rows_of_every_layout_are_asked(user: User) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    ask, said = {"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}
    layouts: dict[str, dict[str, Any]] = {
        "messages": {"messages": [ask, said, ask, said]},
        "bare": {"prompt": [ask]},
        "answer": {"prompt": "1?", "answer": "2"},
        "text": {"prompt": "1 + 1 =", "completion": " 2"},
        "pair": {"prompt": [ask], "chosen": [said, ask, said], "rejected": [{**said, "content": "3"}]},
    }
    (user.folder / "t.jinja").write_text(
        "{{ tools or '' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    common = {"eval": [], "max_seq_len": 512, "chat_template": "t.jinja"}
    for name, row in layouts.items():
        path = user.folder / f"{name}.jsonl"
        path.write_text(json.dumps({**row, "tools": [tool]} if name == "messages" else row) + "\n")
        layout = "preference" if name == "pair" else "auto"
        recipe = judged(user, data={**common, "train": [str(path)], "format": layout})
        drawn = user.done("sample", recipe, *LOOSE, "--output", name, "--as", "pairs")
        assert drawn["pairs"]["rows"] == 1, name
        (pair,) = rows_in(user.folder / name / "pairs.jsonl")
        wanted = {"messages": [ask, said, ask], "text": "1 + 1 ="}.get(name, [ask])
        assert pair["prompt"] == wanted, name
        assert pair.get("tools") == ([tool] if name == "messages" else None)
        assert isinstance(pair["chosen"], str) is (name == "text")
    path.write_text(json.dumps({"text": "only text"}) + "\n")
    recipe = judged(user, data={"train": [str(path)], "eval": []})
    assert refusal(user.run("sample", recipe, *LOOSE, "--output", "none"))[:2] == (4, "FT413")


def test_known_answers_are_needed_only_by_who_compares(user: User) -> None:
    (user.folder / "bare.jsonl").write_text('{"prompt": "1?"}\n')
    data = {"train": ["bare.jsonl"], "eval": []}
    status, code, message = refusal(user.run("sample", user.recipe(data=data, eval={"tasks": [{"use": "contains"}]})))
    assert (status, code) == (4, "FT453")
    assert "this row has none" in message
    drawn = user.done("sample", judged(user, data=data), *LOOSE)
    assert drawn["prompts"] == 1


def test_what_cannot_be_sampled_is_said_before_anything_is_loaded(user: User) -> None:
    recipe = judged(user)
    for words, code in (
        (["--temperature", "0"], "FT159"),
        (["-n", "1", "--as", "pairs"], "FT159"),
        (["--temperature", "nan"], "FT150"),
        (["--min-margin", "inf"], "FT159"),
        (["--min-score", "inf"], "FT159"),
        (["--checkpoint", "best"], "FT154"),
        (["--as", "dpo"], "FT150"),
        (["--max-new-tokens", "64"], "FT267"),
        (["--run", "nowhere"], "FT154"),
        (["--set", "eval.tasks=[]"], "FT284"),
        (["--set", "data.train=[]"], "FT254"),
        (["--set", "eval.tasks.0.file=other.py:score"], "FT451"),
    ):
        status, found, _ = refusal(user.run("sample", recipe, *words))
        assert (status, found) == (2, code), words
    grpo = "grpo={rewards: [{use: exact_match}]}"  # its answers may be longer than the recipe's rows
    assert refusal(user.run("sample", recipe, "--set", grpo))[2].startswith("grpo.max_completion_length 256 leaves no")
    assert not (user.folder / "samples").exists()
    once = user.done("sample", recipe, "--temperature", "0", "-n", "1", "--as", "sft", "--truncated", "keep")
    assert once["sft"]["rows"] == 4


def test_prompts_that_are_too_long_are_treated_as_overlong_says(user: User) -> None:
    (user.folder / "long.jsonl").write_text(json.dumps({"prompt": "x" * 5000}) + '\n{"prompt": "1?"}\n')
    data = {"train": ["long.jsonl"], "eval": []}
    assert refusal(user.run("sample", judged(user, data=data), *LOOSE))[:2] == (4, "FT431")
    assert user.done("sample", judged(user, data={**data, "overlong": "drop"}), *LOOSE)["prompts"] == 1


def test_nothing_to_learn_is_said(user: User) -> None:
    recipe = judged(user, LENGTHS.replace("len(text) / 8", "0.5"))
    status, document = user.run("sample", recipe)
    assert status == 0
    told = {finding["code"]: finding["message"] for finding in document["findings"]}
    assert "no usable answer" in told["FT774"]
    assert document["result"]["truncated"] > 16
    again = user.done("sample", recipe, "--truncated", "keep")
    assert again["pairs"]["left_out"] == {"all answers equally good": 4}
    assert again["without_spread"] == 1.0


def test_what_the_template_writes_otherwise_is_said(user: User) -> None:
    (user.folder / "t.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ ' ' if m.role == 'assistant' }}{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    train = [{"path": "bundled:smoke-train", "max_rows": 4}]
    recipe = judged(user, data={"train": train, "eval": [], "chat_template": "t.jinja"})
    status, document = user.run("sample", recipe, *LOOSE, "--as", "pairs")
    assert status == 0
    assert document["result"]["pairs"]["otherwise"] == 8
    (told,) = [finding["message"] for finding in document["findings"] if finding["code"] == "FT775"]
    assert "8 answers are trained otherwise than they were generated" in told


def test_check_says_what_would_judge(user: User) -> None:
    assert user.done("check", judged(user, data={}))["judges"] == ["mine.py:score"]
    assert "judges" not in user.done("check", user.recipe())


def test_what_was_sampled_does_not_steer_the_terminal(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    loud = LENGTHS.replace("len(text) / 8", "None") + "    # nobody judges"
    assert main(["sample", judged(user, loud), *LOOSE]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "32 not judged" in shown.out
