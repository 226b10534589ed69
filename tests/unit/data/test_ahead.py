"""Conversations that are rendered together give what each gives by itself, in far fewer calls of the template."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ftcli.config.data import DataConfig
from ftcli.data import encode
from ftcli.data.encode import Encoder, TokenizedRows
from ftcli.rows import limits
from ftcli.rows.limits import Allowance, TemplateStopped
from ftcli.rows.row import Row
from tests.unit.data.official import Official

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 2,
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b", "reasoning_content": "I think"}] * 2,
    [{"role": "critic", "content": "q"}, {"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    [{"role": "user", "content": " q "}, {"role": "assistant", "content": "<think>\nso\n</think>\n\na"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}] * 30,
    [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
]


def read(official: Official, **data: Any) -> TokenizedRows:
    config = DataConfig.model_validate({"train": ["x"], "max_seq_len": 10**6, **data})
    rows = [Row("f", number, {"messages": chat}) for number, chat in enumerate(CHATS, 1)]
    return Encoder(official.tokenizer, official.stops, config, "messages").rows(rows)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("qwen3", {}),
        ("gemma3", {"loss_on": "all"}),
        ("deepseek_r1_distill", {"reasoning": "drop"}),
        ("gptoss", {"reasoning": "refuse"}),
        ("llama3_1", {"history": "last"}),
    ],
)
def test_rows_that_are_rendered_together_are_what_each_is(
    name: str, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    official = Official(name)
    together = read(official, **data)
    monkeypatch.setattr(encode, "_FEW_TURNS", 0)  # none is
    alone = read(official, **data)
    assert together == alone
    assert together.tokens
    assert together.findings


@pytest.mark.parametrize(("name", "made", "most"), [("qwen3", 32, 2), ("qwen2_5", 16, 0)])
def test_the_template_is_called_twice_for_many_rows_or_each_is_traced(
    name: str, made: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    official = Official(name)
    encoder = Encoder(official.tokenizer, official.stops, DataConfig(train=["x"]), "messages")
    rows = [Row("f", number, {"messages": CHATS[0]}) for number in range(16)]
    encoder.rows(rows)  # the shape of the conversation is known from here on
    calls, apply = [], official.tokenizer.apply_chat_template

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return apply(*given, **named)

    monkeypatch.setattr(official.tokenizer, "apply_chat_template", counted)
    assert len(encoder.rows(rows).tokens) == made
    assert len(calls) == most


def test_a_template_that_several_conversations_stopped_is_run_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are no reason to refuse a row, and what was wasted is not given again."""
    monkeypatch.setattr(limits, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(limits, "_SECONDS_EACH", 0.01)
    allowance = Allowance()

    def slow() -> str:
        begun = time.process_time()
        while time.process_time() - begun < 5:
            pass
        return "slow"

    with pytest.raises(TemplateStopped, match="too slow"):
        allowance.run(0, slow, conversations=2)
    assert allowance.run(0, lambda: "text") == "text"
    begun = time.process_time()
    with pytest.raises(TemplateStopped, match="too slow"):
        allowance.run(0, slow)
    assert time.process_time() - begun < 0.2
    with pytest.raises(TemplateStopped):
        allowance.run(0, lambda: "text")
