"""What a template leaves out is found by rendering with and without it, whatever the words are."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.data.template import Renderer
from ftcli.errors import FtcliError
from ftcli.rows.row import Row

ROW = Row("f", 1, {})
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
AGENT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"a": "b \\"c\\""}', "name": "weather"},
    {"role": "assistant", "content": "fine"},
]
TURNS = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}"


def renderer(tokenizer: PreTrainedTokenizerBase, template: str, tmp_path: Any, **options: Any) -> Renderer:
    path = tmp_path / "t.jinja"
    path.write_text(template, encoding="utf-8")
    return Renderer(tokenizer, str(path), **options)


def lost(made: Renderer, chat: list[dict[str, Any]], tools: Any = None) -> str:
    with pytest.raises(FtcliError) as caught:
        made.text(chat, ROW, tools=tools)
    assert caught.value.findings[0].code == "FT426"
    return caught.value.findings[0].message


def test_results_that_are_written_as_json_are_no_lost_ones(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any
) -> None:
    template = TURNS.replace("m.content", "(m.content | tojson) ~ (m.tool_calls | default([]) | tojson)")
    assert '\\"b' in renderer(bytes_tokenizer, template, tmp_path).text(AGENT, ROW)


def test_a_lost_call_is_found_though_its_name_occurs_elsewhere(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any
) -> None:
    assert "the call of weather in turn 2" in lost(renderer(bytes_tokenizer, TURNS, tmp_path), AGENT)


def test_lost_arguments_are_found(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any) -> None:
    template = TURNS.replace("m.content", "m.content ~ (m.tool_calls[0].function.name if m.tool_calls else '')")
    message = lost(renderer(bytes_tokenizer, template, tmp_path), AGENT)
    assert "the arguments of the call of weather in turn 2" in message


def test_a_lost_system_text_is_found_though_its_words_occur_elsewhere(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any
) -> None:
    template = TURNS.replace("messages", "messages if m.role != 'system'", 1)
    chat = [{"role": "system", "content": "weather"}, AGENT[0], AGENT[3]]
    assert "turn 1 (system)" in lost(renderer(bytes_tokenizer, template, tmp_path), chat)


def test_a_text_of_which_half_is_lost_is_found(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any) -> None:
    template = TURNS.replace("m.content", "m.content[:8]")
    assert "turn 1 (user)" in lost(renderer(bytes_tokenizer, template, tmp_path), [AGENT[0], AGENT[3]])


def test_a_lost_tool_is_found_though_its_name_occurs_elsewhere(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any
) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    assert "the tool weather" in lost(renderer(bytes_tokenizer, TURNS, tmp_path), [AGENT[0], AGENT[3]], tools)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_shown_under_whatever_key_the_template_reads(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any, key: str
) -> None:
    chat = [AGENT[0], {"role": "assistant", "content": "fine", key: "I wonder"}]
    for read in ("reasoning_content", "thinking", "reasoning"):
        template = TURNS.replace("m.content", f"(m.{read} | default('')) ~ m.content")
        assert "I wonder" in renderer(bytes_tokenizer, template, tmp_path).text(chat, ROW)
    assert "the reasoning of turn 2" in lost(renderer(bytes_tokenizer, TURNS, tmp_path), chat)


def test_reasoning_is_dropped_or_refused_as_the_recipe_says(
    bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any
) -> None:
    for answer in ({"content": "fine", "thinking": "I wonder"}, {"content": "<think>\nI wonder\n</think>\n\nfine"}):
        chat = [AGENT[0], {"role": "assistant", **answer}]
        dropping = renderer(bytes_tokenizer, TURNS, tmp_path, reasoning="drop")
        assert dropping.text(chat, ROW) == "user: What is the weather?\nassistant: fine\n"
        with pytest.raises(FtcliError, match="FT427: turn 2 holds reasoning"):
            renderer(bytes_tokenizer, TURNS, tmp_path, reasoning="refuse").text(chat, ROW)


def test_a_shape_is_probed_once(bytes_tokenizer: PreTrainedTokenizerBase, tmp_path: Any) -> None:
    made = renderer(bytes_tokenizer, TURNS, tmp_path)
    chats = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(5)]
    for chat in chats:
        made.text(chat, ROW)
    assert len(made._presence._shapes) == 1
