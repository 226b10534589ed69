"""Columns beside a conversation are used, or refused by name: `functions` and `chat_template_kwargs`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from ftcli.config.data import DataConfig
from ftcli.data.prepare import PreparedData
from ftcli.data.template import renderer_of
from ftcli.errors import FtcliError
from ftcli.rows.prompts import prompts_of
from ftcli.rows.row import Row

Prepare = Callable[..., PreparedData]
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
FUNCTION = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% if mode %}<{{ mode }}>{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}:{{ m.content }}<end_of_turn>{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant:{% endif %}"
)


@pytest.fixture
def tokenizer(bytes_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """With a template that shows tools, and knows the switch `mode`."""
    own = copy.deepcopy(bytes_tokenizer)
    own.chat_template = TEMPLATE
    return own


def text_of(found: PreparedData, tokenizer: PreTrainedTokenizerBase, row: int = 0) -> str:
    return str(tokenizer.decode(found.sequences[row].input_ids))


def refusal(prepared: Prepare, row: dict[str, Any], **options: Any) -> tuple[str, str]:
    with pytest.raises(FtcliError) as caught:
        prepared([row], **options)
    return caught.value.findings[0].code, caught.value.findings[0].message


def test_functions_are_shown_as_tools_are(prepared: Prepare, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [
        text_of(prepared([{**CHAT, name: value}], tokenizer=tokenizer, max_seq_len=500), tokenizer)
        for name, value in (("functions", [FUNCTION]), ("tools", [{"type": "function", "function": FUNCTION}]))
    ]
    assert texts[0] == texts[1]
    assert '"looks"' in texts[0]


def test_functions_that_the_template_drops_or_that_contradict_tools_are_refused(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    assert refusal(prepared, {**CHAT, "functions": [FUNCTION]})[0] == "FT426"  # Gemma's template shows none
    both = {**CHAT, "functions": [FUNCTION], "tools": [{**FUNCTION, "name": "other"}]}
    code, message = refusal(prepared, both, tokenizer=tokenizer)
    assert (code, "differ" in message) == ("FT412", True)
    assert refusal(prepared, {**CHAT, "functions": "no json"})[0] == "FT412"
    for name in (5, 0.5, True, ["weather"], {}):
        for tool in ({**FUNCTION, "name": name}, {"type": "function", "function": {**FUNCTION, "name": name}}):
            assert refusal(prepared, {**CHAT, "tools": [tool]}, tokenizer=tokenizer)[0] == "FT412"


def test_a_rows_switches_reach_the_template_over_those_of_the_recipe(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{**CHAT, "chat_template_kwargs": {"mode": "deep"}}, CHAT, {**CHAT, "chat_template_kwargs": '{"mode": "x"}'}]
    found = prepared(rows, tokenizer=tokenizer, chat_template_kwargs={"mode": "plain"})
    texts = [text_of(found, tokenizer, n) for n in range(3)]
    assert [text.partition("<start_of_turn>")[0][-7:] for text in texts] == ["s><deep>"[-7:], "<plain>", "bos><x>"]


@pytest.mark.parametrize(
    ("switches", "code", "said"),
    [
        ({"unknown": True}, "FT426", "does not read 'unknown'"),
        ({"add_generation_prompt": True}, "FT412", "not a template switch"),
        ({"mode": [1]}, "FT412", "must map names"),
        ("no json", "FT412", "not JSON"),
    ],
)
def test_switches_that_would_be_ignored_are_refused(
    prepared: Prepare, tokenizer: PreTrainedTokenizerBase, switches: object, code: str, said: str
) -> None:
    found = refusal(prepared, {**CHAT, "chat_template_kwargs": switches}, tokenizer=tokenizer)
    assert (found[0], said in found[1]) == (code, True)


def test_prompts_of_tasks_and_grpo_have_their_rows_tools_and_switches(tokenizer: PreTrainedTokenizerBase) -> None:
    renderer = renderer_of(tokenizer, DataConfig())
    extra = {"functions": [FUNCTION], "chat_template_kwargs": {"mode": "deep"}}
    rows = [Row("d", 1, {"prompt": "q", **extra}), Row("d", 2, {"prompt": "q"})]
    first, second = (renderer.prompt(prompt) for prompt in prompts_of(rows, "auto"))
    assert '"looks"' in first
    assert "<deep>" in first
    assert "deep" not in second
    (answered,) = prompts_of([Row("d", 1, {**CHAT, **extra})], "auto")
    assert "<deep>" in renderer.prompt(answered)
