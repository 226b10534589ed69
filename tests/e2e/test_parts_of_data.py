"""Rows held out by their hash, long texts in pieces, sources that are seen several times an epoch."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.data import DataConfig, DatasetConfig, Part
from ftcli.config.model import ModelConfig
from ftcli.data.order import epochs_of, mixture
from ftcli.data.prepare import prepare
from ftcli.labels import IGNORE_INDEX
from ftcli.model.tokenizer import load_tokenizer
from ftcli.rows.reading import iterate
from ftcli.rows.row import Row
from tests.e2e.conftest import User


def chat(word: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path: str, held_out: bool, share: float = 0.25, **settings: Any) -> list[str]:
    source = DatasetConfig(path=path, **settings).with_part(Part(share, held_out))
    return [row.fields["messages"][0]["content"] for row in iterate(source) if isinstance(row, Row)]


def test_the_parts_are_all_rows_and_more_rows_move_none(tmp_path: Path) -> None:
    words = [f"word {n}" for n in range(2000)]
    path = write(tmp_path / "a.jsonl", [chat(word) for word in words])
    held, trained = read(path, True), read(path, False)
    assert sorted(held + trained) == sorted(words)
    assert not set(held) & set(trained)
    assert len(held) == pytest.approx(500, abs=4 * (2000 * 0.25 * 0.75) ** 0.5)
    more = [*words, *(f"new {n}" for n in range(500)), words[0]]
    random.Random(3).shuffle(more)
    path = write(tmp_path / "b.jsonl", [chat(word) for word in more])
    assert set(held) == set(read(path, True)) & set(words)
    assert set(trained) == set(read(path, False)) & set(words)
    assert set(held) <= set(read(path, True, share=0.5)), "a larger share holds the smaller one's rows out too"
    first = read(path, True, max_rows=100) + read(path, False, max_rows=100)
    assert sorted(first) == sorted(more[:100]), "the parts are of the same first rows"


def test_a_run_trains_on_one_part_and_is_measured_on_the_other(user: User) -> None:
    path = write(user.folder / "a.jsonl", [chat(f"w{n}") for n in range(60)])
    recipe = user.recipe(
        "r",
        data={"train": [path], "eval": [], "held_out": 0.25},
        eval={"every_steps": 2, "samples": 1},
        train={"max_steps": 2},
    )
    result = user.done("train", recipe)
    assert result["eval"]["loss"] > 0
    said = json.loads((user.folder / "r" / "tokens.json").read_text())["datasets"]
    rows = {each["split"]: each["rows"] for each in said}
    assert rows == {"train": len(read(path, False)), "eval": len(read(path, True))}
    assert user.done("eval", recipe, "--run", str(user.folder / "r"))["run"]["loss"] == pytest.approx(
        result["eval"]["loss"]
    )
    assert "held_out: 0.25" in (user.folder / "r" / "recipe.yaml").read_text()
    assert "part:" not in (user.folder / "r" / "recipe.yaml").read_text()
    assert user.done("train", recipe)["already_complete"]


def test_a_share_that_leaves_nothing_is_refused(user: User) -> None:
    path = write(user.folder / "a.jsonl", [chat("one")])
    status, document = user.run("train", user.recipe("r", data={"train": [path], "held_out": 0.01}))
    (finding,) = (f for f in document["findings"] if f["severity"] == "error")
    assert (status, finding["code"]) == (4, "FT404")
    assert "data.held_out 0.01 leaves no row" in finding["message"]


def stops(tokenizer: Any) -> list[int]:
    return [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<end_of_turn>")]


def tokens_of(text: str, limit: int, tmp_path: Path, **settings: Any) -> Any:
    path = write(tmp_path / "t.jsonl", [{"text": text}, {"text": "short"}])
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    data = DataConfig(max_seq_len=limit, overlong="split", **settings)
    return prepare([DatasetConfig(path=path)], data, tokenizer, stops(tokenizer))


@pytest.mark.parametrize("length", [7, 8, 9, 14, 15, 16, 40])
def test_every_token_of_a_long_text_is_learned_once(length: int, tmp_path: Path) -> None:
    text = "".join(chr(97 + n % 26) for n in range(length))
    whole, split = tokens_of(text, 100, tmp_path).sequences, tokens_of(text, 8, tmp_path)
    pieces = [row for row in split.sequences if row.row.number == 1]
    assert all(len(row.input_ids) <= 8 for row in pieces)
    learned = [label for row in pieces for label in row.labels[1:]]
    assert learned == list(whole[0].labels[1:])
    assert IGNORE_INDEX not in learned
    for before, after in pairwise(pieces):
        assert after.input_ids[0] == before.input_ids[-1]
        assert after.labels[0] == IGNORE_INDEX
    (ledger,) = split.ledgers
    assert ledger.counts.get("rows_split", 0) == len(pieces) - 1
    assert (ledger.cut_tokens, ledger.dropped_rows) == (0, 0)


def test_conversations_are_not_split(tmp_path: Path, user: User) -> None:
    path = write(tmp_path / "a.jsonl", [chat("w" * 90)])
    status, document = user.run("train", user.recipe("r", data={"train": [path], "overlong": "split"}))
    (finding,) = (f for f in document["findings"] if f["severity"] == "error")
    assert (status, finding["code"]) == (4, "FT431")
    assert "pieces are made of rows of text" in finding["message"]


def test_packed_pieces_train(user: User) -> None:
    path = write(user.folder / "t.jsonl", [{"text": "abcdefgh" * 60}, {"text": "ij"}])
    recipe = user.recipe("r", data={"train": [path], "overlong": "split", "packing": True}, train={"max_steps": 2})
    assert user.done("train", recipe)["steps"] == 2


def test_an_epoch_shows_each_source_as_often_as_it_says(tmp_path: Path) -> None:
    mix = mixture((10, 4), None, (1.0, 2.5))
    assert mix.counts == (10, 10)
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True)
    paths = [write(tmp_path / f"{name}.jsonl", [chat(f"{name}{n}") for n in range(4)]) for name in "ab"]
    data = DataConfig(train=[{"path": path, "epochs": times} for path, times in zip(paths, (1.0, 2.5), strict=True)])
    table = prepare(data.train, data, tokenizer, stops(tokenizer)).sequences
    for packing in (False, True):
        epochs = epochs_of(table, data.weights, packing=packing, capacity=200, seed=0, repeats=data.epochs)
        seen = [row.row.source for unit in epochs.order(0) for row in epochs.members(unit)]
        assert [seen.count(path) for path in paths] == [4, 10]
    one = DataConfig(train=[{"path": paths[0], "epochs": 3.0}])
    epochs = epochs_of(
        prepare(one.train, one, tokenizer, stops(tokenizer)).sequences,
        None,
        packing=False,
        capacity=200,
        seed=0,
        repeats=one.epochs,
    )
    assert sorted(epochs.order(0)) == [n for n in range(4) for _ in range(3)]


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ({"train": [{"path": "bundled:smoke-train", "epochs": 2, "weight": 1}]}, "sft"),
        ({"eval": [{"path": "bundled:smoke-eval", "epochs": 2}]}, "sft"),
        ({"train": [{"path": "bundled:smoke-pairs", "epochs": 2}]}, "dpo"),
    ],
)
def test_epochs_that_cannot_be_are_refused(data: dict[str, Any], method: str, user: User) -> None:
    status, document = user.run("check", user.recipe("r", data=data, train={"method": method}))
    codes = [f["code"] for f in document["findings"] if f["severity"] == "error"]
    assert (status, set(codes)) == (2, {"FT257"})
