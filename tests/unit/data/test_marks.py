"""Turns and parts that a row marks not to be trained bear no loss, in every field's own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.data.prepare import PreparedData
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX

Prepare = Callable[..., PreparedData]


def chat(**first: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one", **first},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "two"},
    ]
    return {"messages": turns}


def trained(tokenizer: PreTrainedTokenizerBase, found: PreparedData) -> str:
    tokens = found.sequences[0]
    chosen = [i for i, label in zip(tokens.input_ids, tokens.labels, strict=True) if label != IGNORE_INDEX]
    return str(tokenizer.decode(chosen))


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"training": False}, {"masked": True}, {"weight": 0.0}]
)
def test_a_marked_turn_bears_no_loss_and_stays_in_the_text(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase, mark: dict[str, Any]
) -> None:
    found, plain = prepared([chat(**mark)]), prepared([chat()])
    assert trained(bytes_tokenizer, found) == "two<end_of_turn>"
    assert found.sequences[0].input_ids == plain.sequences[0].input_ids
    assert found.ledgers[0].counts["turns_marked"] == 1


@pytest.mark.parametrize(
    "mark", [{"weight": 1}, {"train": True}, {"training": True}, {"masked": False}, {"weight": None}]
)
def test_a_turn_that_is_marked_to_be_trained_is(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase, mark: dict[str, Any]
) -> None:
    assert trained(bytes_tokenizer, prepared([chat(**mark)])) == "one<end_of_turn>two<end_of_turn>"


def test_sharegpt_and_prompt_lists_have_marks_too(prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "one", "weight": 0}]
    turns += [{"from": "human", "value": "r"}, {"from": "gpt", "value": "two"}]
    assert trained(bytes_tokenizer, prepared([{"conversations": turns}])) == "two<end_of_turn>"
    messages = chat(train=False)["messages"]
    lists = {"prompt": messages[:1], "completion": messages[1:]}
    assert trained(bytes_tokenizer, prepared([lists])) == "two<end_of_turn>"


def test_parts_of_a_content_are_marked(prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase) -> None:
    for mark in ({"train": False}, {"weight": 0}):
        parts = [
            {"type": "text", "text": "sure, "},
            {"type": "text", "text": "wrong ", **mark},
            {"type": "text", "text": "ok"},
        ]
        assert trained(bytes_tokenizer, prepared([chat(content=parts)])) == "sure, ok<end_of_turn>two<end_of_turn>"
    whole = [{"type": "text", "text": "all", "train": False}]
    assert trained(bytes_tokenizer, prepared([chat(content=whole)])) == "two<end_of_turn>"


def test_axolotls_ranges_count_their_last_character(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase
) -> None:
    detail = [
        {"begin_offset": 0, "end_offset": 3, "train": True},
        {"begin_offset": 4, "end_offset": 6, "train": False},
    ]
    row = chat(content="abcdEFGhi", train_detail=detail)
    assert trained(bytes_tokenizer, prepared([row])) == "abcdhi<end_of_turn>two<end_of_turn>"


def test_harmless_marks_of_other_turns_are_accepted(prepared: Prepare) -> None:
    for mark in ({"weight": 0}, {"weight": 1}, {"train": False}, {"masked": True}, {"training": False}):
        row = chat()
        row["messages"][0].update(mark)
        assert len(prepared([row]).sequences) == 1


@pytest.mark.parametrize(
    ("turn", "mark", "words"),
    [
        (1, {"weight": 0.5}, "nothing between"),
        (1, {"weight": "none"}, "nothing between"),
        (1, {"weight": 0, "train": True}, "that it is to be trained and that it is not"),
        (1, {"train_detail": [{"begin_offset": 0}]}, "needs begin_offset"),
        (1, {"train_detail": [{"begin_offset": 0, "end_offset": 1e999, "train": False}]}, "needs begin_offset"),
        (1, {"train_detail": [{"begin_offset": 0, "end_offset": 1.5, "train": False}]}, "needs begin_offset"),
        (1, {"train_detail": 1}, "must be a list"),
        (0, {"train": True}, "only the assistant's turns are"),
        (0, {"masked": False}, "only the assistant's turns are"),
    ],
)
def test_marks_that_cannot_be_honoured_are_refused(
    prepared: Prepare, turn: int, mark: dict[str, Any], words: str
) -> None:
    row = chat()
    row["messages"][turn].update(mark)
    with pytest.raises(FtcliError, match=words):
        prepared([row])


def test_marks_and_a_loss_on_everything_contradict(prepared: Prepare) -> None:
    with pytest.raises(FtcliError, match="FT434: turn 2 is marked"):
        prepared([chat(train=False)], loss_on="all")


def test_a_row_of_which_nothing_is_left_says_so(prepared: Prepare) -> None:
    row = chat(train=False)
    row["messages"][3]["train"] = False
    with pytest.raises(FtcliError, match="FT432"):
        prepared([row])


def test_a_part_that_the_template_changes_cannot_be_placed(prepared: Prepare, tmp_path: Any) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper if m.role == 'assistant' else m.content }}"
        "<end_of_turn>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "train": False}]
    with pytest.raises(FtcliError, match="FT428"):
        prepared([chat(content=parts)], chat_template=str(path))
