"""Every layout becomes the same kind of example; rows that do not fit are named."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.errors import FtcliError
from ftcli.rows.layouts import layout_of, understand
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Example, Misfit, Row

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def rows(*fields: dict[str, Any]) -> list[Row]:
    return [Row("d.jsonl", i + 1, f) for i, f in enumerate(fields)]


def example_of(fields: dict[str, Any], layout: str = "auto") -> Example:
    (row,) = rows(fields)
    return understand(row, layout_of(row, layout))


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sharegpt"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"prompt": "q", "answer": "a"}, "prompt_answer"),
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"text": "t"}, "text"),
    ],
)
def test_layouts_are_detected(fields: dict[str, Any], layout: str) -> None:
    assert layout_of(rows(fields)[0], "auto") == layout
    assert example_of(fields).row.fields == fields


def test_chat_layouts_agree() -> None:
    same = {"messages": CHAT, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    expected = tuple(CHAT)
    assert example_of(same, "messages").messages == expected
    assert example_of(same, "sharegpt").messages == expected
    assert example_of({"instruction": "q", "output": "a"}).messages == expected


def test_alpaca_input_and_system() -> None:
    example = example_of({"instruction": "q", "input": "ctx", "output": "a", "system": "s"})
    assert example.messages is not None
    assert [m["content"] for m in example.messages] == ["s", "q\n\nctx", "a"]


def test_unknown_columns_name_what_was_expected() -> None:
    with pytest.raises(FtcliError, match="FT411") as caught:
        layout_of(rows({"question": "q"})[0], "auto")
    assert "messages" in (caught.value.findings[0].help or "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"role": "user", "content": "q"}]}, "nothing to train on"),
        ({"messages": [{"role": "user", "content": 3}, *CHAT]}, "message 1 has no text"),
        ({"messages": [{"content": "q"}]}, "has no 'role'"),
        ({"conversations": [{"from": "robot", "value": "q"}]}, "unknown role 'robot'"),
        ({"prompt": "q", "completion": [CHAT[1]]}, "both be strings"),
        ({"prompt": "q", "completion": ""}, "not empty"),
        ({"prompt": "q", "answer": True}, "a string or a number"),
        ({"prompt": 3, "answer": "a"}, "a string or a list of messages"),
        ({"text": 7}, "must be a string"),
    ],
)
def test_misfits_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(Misfit) as misfit:
        example_of(fields)
    assert words in str(misfit.value)
    with pytest.raises(FtcliError) as caught:  # as a prompt, which is refused with its place
        prompts_of(rows(fields), "auto")
    assert caught.value.findings[0].code in ("FT412", "FT414")
    assert str(caught.value.findings[0].origin) == "d.jsonl:1"


def test_prompts_keep_the_last_answer_as_reference() -> None:
    chat = [*CHAT, {"role": "user", "content": "q2"}, {"role": "assistant", "content": "a2"}]
    prompt = prompts_of(rows({"messages": chat}), "auto")[0]
    assert prompt.reference == "a2"
    assert prompt.messages == tuple(chat[:-1])
    plain = prompts_of(rows({"prompt": "1+1=", "completion": "2"}), "auto")[0]
    assert (plain.text, plain.reference) == ("1+1=", "2")


def test_prompts_with_an_answer_column_are_questions_with_a_reference() -> None:
    prompt = prompts_of(rows({"prompt": "q", "answer": 4}), "auto")[0]
    assert prompt.messages == ({"role": "user", "content": "q"},)
    assert prompt.reference == "4"
    chat = [{"role": "user", "content": "q"}]
    assert prompts_of(rows({"prompt": chat, "answer": "4"}), "auto")[0].messages == tuple(chat)


def test_bare_prompts_have_no_reference() -> None:
    assert prompts_of(rows({"prompt": "q"}), "auto")[0].reference is None
    with pytest.raises(FtcliError, match="FT414"):
        prompts_of(rows({"prompt": 5}), "auto")


def test_text_has_no_prompt() -> None:
    with pytest.raises(FtcliError, match="FT413"):
        prompts_of(rows({"text": "t"}), "auto")
