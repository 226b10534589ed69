"""Columns beside those of a layout: which are named, which are refused, and what is proposed for unknown ones."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.errors import FtcliError
from ftcli.rows.columns import UnreadColumns, mapping
from ftcli.rows.layouts import layout_of
from ftcli.rows.row import Row

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PAIR = {"prompt": "q", "completion": "a"}


def census(rows: list[dict[str, Any]], layout: str, *, asked: bool = False, **source: Any) -> UnreadColumns:
    found = UnreadColumns(DatasetConfig.model_validate({"path": "d.jsonl", **source}), layout, asked=asked)
    for number, fields in enumerate(rows, 1):
        found.look(Row("d.jsonl", number, fields))
    return found


BAD_HALF = {
    "label of pairs": ("prompt_completion", [{**PAIR, "label": True}, {**PAIR, "label": False}], "KTO"),
    "label as CSV has it": ("prompt_completion", [{**PAIR, "label": "True"}, {**PAIR, "label": "False"}], "KTO"),
    "label of a chat": ("messages", [{"messages": CHAT, "label": 1}, {"messages": CHAT, "label": 0}], "KTO"),
    "kto_tag": ("sharegpt", [{"conversations": CHAT}, {"conversations": CHAT, "kto_tag": False}], "KTO"),
    "desirable": ("alpaca", [{}, {"instruction": "q", "output": "a", "desirable": "no"}], "KTO"),
    "chosen beside messages": ("messages", [{}, {"messages": CHAT, "chosen": CHAT, "rejected": CHAT}], "DPO"),
    "names with these words": ("text", [{}, {"text": "a", "response_rejected": "b"}], "DPO"),
    "scores": ("prompt_answer", [{"score": 1}, {"prompt": "q", "answer": "a", "score": "0.5"}], "ratings"),
}


@pytest.mark.parametrize(("layout", "rows", "method"), BAD_HALF.values(), ids=BAD_HALF)
def test_a_column_that_says_what_is_bad_is_refused(layout: str, rows: list[dict[str, Any]], method: str) -> None:
    refusal = census(rows, layout).refusal()
    assert refusal is not None
    assert refusal.code == "FT408"
    assert str(refusal.origin) == "d.jsonl:2"
    assert refusal.help is not None
    assert method in refusal.help
    wanted = f"{method} is `train.method: {method.lower()}`" if method in ("DPO", "KTO") else "not offered yet"
    assert wanted in refusal.help
    if method == "KTO":
        (name,) = (name for name in refusal.message.split("'")[1:2])
        assert ("columns: {label: desirable}" in refusal.help) == (name == "desirable")
    assert "remove_columns: [" in refusal.help


HARMLESS = {
    "only good ones": ("prompt_completion", [{**PAIR, "label": True}, {**PAIR, "label": 1}]),
    "a category": ("messages", [{"messages": CHAT, "label": "coding"}, {"messages": CHAT, "label": "maths"}]),
    "one score for all": ("messages", [{"messages": CHAT, "score": 1.0}, {"messages": CHAT, "score": 1}]),
    "scores of plain text": ("text", [{"text": "a", "score": 1.0}, {"text": "b", "score": 2.0}]),
    "classes of plain text": ("text", [{"text": "a", "label": 0}, {"text": "b", "label": 1}]),
    "scores in words": ("messages", [{"messages": CHAT, "score": "good"}, {"messages": CHAT, "score": "better"}]),
}


@pytest.mark.parametrize(("layout", "rows"), HARMLESS.values(), ids=HARMLESS)
def test_what_judges_nothing_is_only_named(layout: str, rows: list[dict[str, Any]]) -> None:
    found = census(rows, layout)
    assert found.refusal() is None
    assert list(found.names) == [name for name in ("label", "score") if name in rows[0]]


def test_a_mapped_half_of_a_pair_is_what_was_wanted() -> None:
    found = census(
        [{**PAIR, "rejected": "b", "score_chosen": 3}], "prompt_completion", columns={"completion": "chosen"}
    )
    assert found.refusal() is None
    assert list(found.names) == ["rejected", "score_chosen"]


def test_what_is_asked_may_be_rated_but_not_called_bad() -> None:
    rows = [{"prompt": "q", "answer": "a", "score": n, "chosen": "x"} for n in (1, 2)]
    assert census(rows, "prompt_answer", asked=True).refusal() is None
    assert census([{**PAIR, "label": False}], "prompt_completion", asked=True).refusal() is not None


def test_what_is_read_or_empty_is_not_named() -> None:
    row = {"messages": CHAT, "tools": "[]", "chat_template_kwargs": {}, "source": None, "images": [], "id": 0}
    assert list(census([row], "messages").names) == ["id"]
    assert list(census([{**PAIR, "tools": "[1]"}], "prompt_completion").names) == ["tools"]
    assert list(census([{"prompt": CHAT, "completion": CHAT, "tools": "[1]"}], "prompt_completion").names) == []


PROPOSED = [
    ({"question": "q", "reply": "a"}, "{prompt: question, completion: reply}"),
    ({"Question": "q", "Answer": "a", "id": 3}, "{prompt: Question, completion: Answer}"),
    ({"prompt": "q", "response": "a"}, "{completion: response}"),
    ({"instruction": "q", "response": "a"}, "{output: response}"),
    ({"conversation": CHAT}, "{messages: conversation}"),
    ({"dialog": [{"from": "human", "value": "q"}]}, "{conversations: dialog}"),
    ({"content": "long"}, "{text: content}"),
]


@pytest.mark.parametrize(("fields", "columns"), PROPOSED)
def test_the_mapping_is_proposed(fields: dict[str, Any], columns: str) -> None:
    with pytest.raises(FtcliError) as caught:
        layout_of(Row("d.jsonl", 1, fields), "auto")
    (finding,) = caught.value.findings
    assert (finding.code, finding.help is not None) == ("FT411", True)
    assert f"write `columns: {columns}` beside `path`" in str(finding.help)


@pytest.mark.parametrize(
    ("fields", "columns"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "{completion: chosen}"),
        ({"chosen": CHAT, "rejected": CHAT}, "{messages: chosen}"),
    ],
)
def test_preference_pairs_are_called_that(fields: dict[str, Any], columns: str) -> None:
    with pytest.raises(FtcliError) as caught:
        layout_of(Row("d.jsonl", 1, fields), "auto")
    (finding,) = caught.value.findings
    assert finding.message.endswith("are preference pairs")
    assert "DPO is `train.method: dpo` of `ftcli train`, with the section `preference`" in str(finding.help)
    assert f"`columns: {columns}`" in str(finding.help)


def test_a_column_without_a_name_is_no_suggestion() -> None:
    assert mapping({"": [{"role": "user", "content": "a"}]}) is None
    assert mapping({"": "a", "question": "b"}) is None
