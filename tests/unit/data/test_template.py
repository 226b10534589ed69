"""What a template lacks or leaves out is said; tools and several turns are rendered and masked as the template does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.data.prepare import PreparedData
from ftcli.data.template import Renderer
from ftcli.errors import FtcliError
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Row

Prepare = Callable[..., PreparedData]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
AGENT = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "name": "weather"},
    {"role": "assistant", "content": "No."},
]
#: A template in the manner of Hermes: tools at the head, calls as JSON, every turn ended by the stop token.
AGENTIC = """{%- if tools %}{{ '<start_of_turn>tools ' ~ (tools | tojson) ~ '<end_of_turn>' }}{% endif -%}
{%- for m in messages -%}
{{- '<start_of_turn>' ~ m.role ~ '\\n' -}}
{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}{{- c.function | tojson -}}{%- endfor -%}{%- endif -%}
{{- m.content ~ '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>assistant\\n' }}{% endif -%}"""


@pytest.fixture
def agentic(tmp_path: Path) -> str:
    """A template file that knows tools."""
    path = tmp_path / "agentic.jinja"
    path.write_text(AGENTIC, encoding="utf-8")
    return str(path)


def trained(tokenizer: PreTrainedTokenizerBase, found: PreparedData, row: int = 0) -> str:
    tokens = found.sequences[row]
    chosen = [i for i, label in zip(tokens.input_ids, tokens.labels, strict=True) if label != IGNORE_INDEX]
    return str(tokenizer.decode(chosen))


def refused(prepared: Prepare, rows: list[Any], **options: Any) -> Any:
    with pytest.raises(FtcliError) as caught:
        prepared(rows, **options)
    return caught.value.findings


def test_calls_and_answers_are_trained_and_results_are_not(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase, agentic: str
) -> None:
    found = prepared([{"messages": AGENT, "tools": TOOLS}], chat_template=agentic, max_seq_len=500)
    text = bytes_tokenizer.decode(found.sequences[0].input_ids)
    assert '"name": "weather"' in text
    call = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    assert trained(bytes_tokenizer, found) == f"{call}<end_of_turn>No.<end_of_turn>"


def test_sharegpt_function_calls_and_json_tools_give_the_same_tokens(prepared: Prepare, agentic: str) -> None:
    turns = [
        {"from": "human", "value": "Rain?"},
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": {"city": "Bonn"}})},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "No."},
    ]
    options = {"chat_template": agentic, "max_seq_len": 500}
    sharegpt = prepared([{"conversations": turns, "tools": json.dumps(TOOLS)}], **options)
    messages = prepared(
        [{"messages": [{k: v for k, v in m.items() if k != "name"} for m in AGENT], "tools": TOOLS}], **options
    )
    assert sharegpt.sequences[0].input_ids == messages.sequences[0].input_ids
    assert sharegpt.sequences[0].labels == messages.sequences[0].labels


def test_a_template_without_tools_is_refused_and_not_obeyed(prepared: Prepare) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (finding,) = refused(prepared, [{"messages": chat, "tools": TOOLS}])
    assert (finding.code, finding.origin.line) == ("FT426", 1)
    assert "the tool weather" in finding.message


def test_a_template_that_drops_a_turn_is_refused(prepared: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages if m.role != 'system' %}{{ m.content }}<end_of_turn>{% endfor %}")
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": [{"role": "system", "content": "be brief"}, *chat]}, {"messages": chat}]
    (finding,) = refused(prepared, rows, chat_template=str(path))
    assert finding.code == "FT426"
    assert "turn 1 (system)" in finding.message


def test_a_template_that_trims_is_none_that_drops(prepared: Prepare, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}{{ m.content | trim }}<end_of_turn>{% endfor %}")
    chat = [{"role": "user", "content": "  q \n"}, {"role": "assistant", "content": "a "}]
    assert len(prepared([{"messages": chat}], chat_template=str(path)).sequences) == 1


def test_a_missing_role_is_told_apart_from_a_wrong_order(prepared: Prepare) -> None:
    user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    rows = [
        {"messages": [{"role": "tool", "content": "x"}, user, assistant]},
        {"messages": [user, user, assistant]},
    ]
    findings = refused(prepared, rows)
    assert [finding.code for finding in findings] == ["FT425", "FT422"]
    assert "'tool'" in findings[0].message
    assert "alternate" in findings[1].help


def test_completion_trains_every_answer_in_the_completion(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase
) -> None:
    def turns(*texts: str, first: int = 0) -> list[dict[str, str]]:
        return [{"role": ("user", "assistant")[(first + n) % 2], "content": text} for n, text in enumerate(texts)]

    row = {"prompt": turns("q1", "a1", "q2"), "completion": turns("a2", "q3", "a3", first=1)}
    assert trained(bytes_tokenizer, prepared([row])) == "a2<end_of_turn>a3<end_of_turn>"
    everything = prepared([row], loss_on="assistant")
    assert trained(bytes_tokenizer, everything) == "a1<end_of_turn>a2<end_of_turn>a3<end_of_turn>"


def test_generation_sees_exactly_what_training_saw_before_the_answer(
    prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase
) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    renderer = Renderer(bytes_tokenizer)
    for fields in ({"messages": chat}, {"prompt": "1+1=", "completion": "2"}, {"prompt": "q", "answer": "a"}):
        tokens = prepared([fields]).sequences[0]
        (prompt,) = prompts_of([Row("d", 1, fields)], "auto")
        ids = bytes_tokenizer(renderer.prompt(prompt), add_special_tokens=False)["input_ids"]
        first = next(n for n, label in enumerate(tokens.labels) if label != IGNORE_INDEX)
        assert tokens.input_ids[:first] == ids


def test_no_second_bos(prepared: Prepare, bytes_tokenizer: PreTrainedTokenizerBase) -> None:
    ids = prepared([{"text": "<bos>abc"}]).sequences[0].input_ids
    assert ids.count(int(bytes_tokenizer.bos_token_id)) == 1
