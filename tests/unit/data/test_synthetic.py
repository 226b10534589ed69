"""The generated text tasks: right answers, the same from the same seed, held-out prompts apart from training."""

from __future__ import annotations

import gzip
import hashlib
import json
from itertools import permutations
from pathlib import Path
from random import Random

import pytest
import synthetic

from ftcli.assets import asset

KINDS = ("pretrain", "mirror", "pick", "desk")


def digest(kind: str, *, count: int, seed: int, evaluation: bool) -> str:
    content = synthetic.rows(kind, count, seed, evaluation=evaluation)
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in content).encode()).hexdigest()[:16]


def prompts(row: dict[str, object]) -> list[str]:
    if isinstance(row.get("prompt"), str):
        return [str(row["prompt"])]
    messages = row.get("messages") or row["prompt"]
    assert isinstance(messages, list)
    return [message["content"] for message in messages if message["role"] == "user"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_follow_from_the_seed_alone(kind: str) -> None:
    first = digest(kind, count=50, seed=7, evaluation=False)
    assert first == digest(kind, count=50, seed=7, evaluation=False)
    assert first != digest(kind, count=50, seed=8, evaluation=False)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("pretrain", "523c49581a2fa450"), ("mirror", "deda542eaa5e12f2"), ("pick", "9565ff03002bc843")],
)
def test_rows_are_the_same_on_every_machine_and_python(kind: str, expected: str) -> None:
    assert digest(kind, count=200, seed=0, evaluation=False) == expected


@pytest.mark.parametrize(
    ("name", "kind", "count", "evaluation"),
    [
        ("tiny-pretrain.jsonl.gz", "pretrain", 30000, False),
        ("tiny-pretrain-eval.jsonl", "pretrain", 500, True),
        ("smoke-train.jsonl", "mirror", 1600, False),
        ("smoke-eval.jsonl", "mirror", 200, True),
        ("smoke-grpo-train.jsonl", "pick", 1000, False),
        ("smoke-grpo-eval.jsonl", "pick", 200, True),
        ("tiny-agent-calls.jsonl.gz", "calls", 3000, False),
        ("smoke-agent-train.jsonl", "desk", 400, False),
    ],
)
def test_bundled_files_are_what_the_generator_writes(
    name: str, kind: str, count: int, evaluation: bool, tmp_path: Path
) -> None:
    fresh = tmp_path / name
    flag = ["--evaluation"] if evaluation else []
    synthetic.main([kind, "--rows", str(count), "--out", str(fresh), *flag])
    opener = gzip.open if name.endswith(".gz") else open
    with opener(fresh, "rt") as written, opener(asset("data", name), "rt") as bundled:
        assert written.read() == bundled.read()


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_evaluation_share_no_prompt_whatever_the_seeds(kind: str) -> None:
    training = {p for row in synthetic.rows(kind, 500, 0, evaluation=False) for p in prompts(row)}
    evaluation = {p for row in synthetic.rows(kind, 200, 1, evaluation=True) for p in prompts(row)}
    assert training
    assert evaluation
    assert not training & evaluation
    assert all(synthetic.held_out(prompt) for prompt in evaluation)
    assert not any(synthetic.held_out(prompt) for prompt in training)


def test_the_smoke_task_is_absent_from_pretraining() -> None:
    rng = Random(3)
    drawn = [task.draw(rng) for task in synthetic.PRETRAINING.values() for _ in range(300)]
    assert not [e for e in drawn if "mirror" in e.prompt]
    with gzip.open(asset("data", "tiny-pretrain.jsonl.gz"), "rt") as file:
        assert "mirror" not in file.read()


def test_no_pretraining_answer_is_a_word_followed_by_its_reverse() -> None:
    """The new task is new in what it asks for, not only in its name."""
    rng = Random(4)
    drawn = [task.draw(rng) for task in synthetic.PRETRAINING.values() for _ in range(300)]
    palindromes = [e for e in drawn if len(e.answer) >= 6 and e.answer == e.answer[::-1]]
    assert len(palindromes) <= len(drawn) // 200, palindromes[:5]


def test_mirror_and_pick_answers_are_right() -> None:
    rng = Random(5)
    for _ in range(200):
        exchange = synthetic.mirror(rng)
        word = exchange.prompt.removeprefix("mirror: ")
        assert exchange.answer == word + "".join(reversed(word))
        exchange = synthetic.pick_largest(rng)
        numbers = [int(n) for n in exchange.prompt.removeprefix("pick: ").split(" ")]
        assert len(set(numbers)) == 4
        assert int(exchange.answer) == max(numbers)


def test_pretraining_answers_pick_by_position_never_by_size() -> None:
    """GRPO starts at chance: the first number is taken in half of the cases, and no rank is preferred."""
    rng = Random(6)
    task = synthetic.PRETRAINING["pick"]
    ranks, places = [0] * 4, [0] * 4
    for _ in range(4000):
        exchange = task.draw(rng)
        numbers = exchange.prompt.removeprefix("pick: ").split(" ")
        ranks[sorted(numbers).index(exchange.answer)] += 1
        places[numbers.index(exchange.answer)] += 1
    assert all(900 < count < 1100 for count in ranks), ranks
    assert 1900 < places[0] < 2100, places
    assert all(580 < count < 760 for count in places[1:]), places


@pytest.mark.parametrize(
    ("operation", "word", "expected"),
    [
        ("reverse", "kano", "onak"),
        ("dashes", "kano", "k-a-n-o"),
        ("sort", "kano", "akno"),
        ("next", "xyz", "yza"),
        ("consonants", "kano", "kn"),
        ("consonants", "aeiou", "none"),
        ("twice", "ab", "ab ab"),
        ("brackets", "ab", "[ab]"),
        ("length", "kano", "4"),
    ],
)
def test_word_operations(operation: str, word: str, expected: str) -> None:
    assert synthetic.WORD_OPERATIONS[operation](word) == expected


def test_pairs_apply_from_left_to_right() -> None:
    rng = Random(8)
    for _ in range(100):
        exchange = synthetic.PRETRAINING["pair"].draw(rng)
        names, word = exchange.prompt.split(": ")
        for name in names.split(" "):
            word = synthetic.WORD_OPERATIONS[name](word)
        assert exchange.answer == word


def test_evaluation_rows_of_one_task_are_all_different() -> None:
    found = [p for row in synthetic.rows("pick", 200, 0, evaluation=True) for p in prompts(row)]
    assert len(set(found)) == 200


def test_more_different_rows_than_the_task_has_is_an_error() -> None:
    held = sum(synthetic.held_out(f"pick: {' '.join(map(str, four))}") for four in permutations(range(10), 4))
    assert 200 <= held < 400
    few = lambda rng: synthetic.Exchange(f"few: {rng.randrange(9)}", "")  # noqa: E731
    with pytest.raises(ValueError, match="fewer than 10 different prompts"):
        synthetic.task_rows(few, Random(0), 10, evaluation=False)


def test_what_the_desk_asks_its_tools_answer() -> None:
    """The environment of the recipe leads to the answers of its rows."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("desk", asset("environments", "desk.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    desk = module.Desk()
    for row in synthetic.rows("desk", 60, 3, evaluation=False):
        assert desk.reset(**row) is None
        (message,) = row["prompt"]  # type: ignore[misc]
        asked = message["content"]
        assert (desk.calc(asked) if asked[0].isdigit() else desk.find(asked)) == row["answer"]
    assert desk.find("3+4") == "0" == desk.calc("rose")


def test_calls_show_no_tool_as_the_right_one() -> None:
    rows = list(synthetic.rows("calls", 400, 0, evaluation=False))
    digits = {True: 0, False: 0}
    for row in rows:
        asked, call, told, answer = row["messages"]  # type: ignore[misc]
        function = call["tool_calls"][0]["function"]
        assert function["arguments"]["text"] == asked["content"]
        assert told["content"] == answer["content"]
        if asked["content"][0].isdigit():
            digits[function["name"] == "calc"] += 1
    assert 0.35 < digits[True] / sum(digits.values()) < 0.65
