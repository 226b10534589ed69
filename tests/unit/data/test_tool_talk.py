"""Calls of tools and their answers, as chat templates write them: TRL's own tokens, and nothing rendered again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from trl import GRPOTrainer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

from ftcli.config.data import DataConfig
from ftcli.config.model import ModelConfig
from ftcli.data.template import renderer_of
from ftcli.data.tool_talk import ToolTalk
from ftcli.errors import FtcliError
from ftcli.model.tokenizer import load_tokenizer
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string", "description": "what"}},
                "required": ["text"],
            },
        },
    }
    for name in ("calc", "find")
]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
#: Templates of TRL's collection that know tools, and the token that ends a turn.
OFFICIAL = {"qwen3": "<|im_end|>", "qwen2_5": "<|im_end|>", "llama3_1": "<|eot_id|>", "gptoss": "<|call|>"}


def tokenizer_of(name: str) -> Any:
    tokenizer = load_tokenizer(ModelConfig(name_or_path="bundled:tiny-agent"), offline=True)
    if name != "own":
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|call|>", "<|return|>"]}
        )
        tokenizer.eos_token = OFFICIAL[name]
    return tokenizer


def talk_of(tokenizer: Any) -> ToolTalk:
    return ToolTalk(tokenizer, renderer_of(tokenizer, DataConfig(train=())), SCHEMAS, [tokenizer.eos_token_id])


@pytest.mark.parametrize("name", ["own", *OFFICIAL])
def test_what_a_tool_answers_is_trls(name: str) -> None:
    tokenizer = tokenizer_of(name)
    trainer: Any = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False
    )
    for said in ([("calc", "7")], [("calc", "7"), ("find", "a\nb {'error': 'x'}")]):
        if name == "llama3_1" and len(said) > 1:
            continue
        messages = [{"role": "tool", "name": one, "content": text} for one, text in said]
        if not is_chat_template_prefix_preserving(tokenizer):
            trainer.chat_template = get_training_chat_template(tokenizer)
        wanted = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
        found = talk_of(tokenizer).answers(said)
        assert found == wanted
        assert "7" in tokenizer.decode(found)


def prompt(*turns: str) -> Prompt:
    messages = tuple(
        {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, turns, strict=False)
    )
    return Prompt(Row("d", 1, {}), messages, None, None)


@pytest.mark.parametrize("name", ["own", "qwen3", "qwen2_5"])
def test_calls_are_read_as_they_were_written(name: str) -> None:
    tokenizer = tokenizer_of(name)
    talk = talk_of(tokenizer)
    text = talk.prompt(prompt("3+4"), None)
    assert all(schema["function"]["name"] in text for schema in SCHEMAS)
    before = tokenizer(text, add_special_tokens=False)["input_ids"]

    def turn(said: str) -> Any:
        return talk.turn(tokenizer(said + tokenizer.eos_token, add_special_tokens=False)["input_ids"], before)

    one = '<tool_call>{"name": "calc", "arguments": {"text": "3+4"}}</tool_call>'
    two = '<tool_call>{"name": "find", "arguments": {"text": "rose"}}</tool_call>'
    assert turn(one).calls == (("calc", {"text": "3+4"}),)
    assert turn(f"so {one}\n{two}").calls == (("calc", {"text": "3+4"}), ("find", {"text": "rose"}))
    assert turn("it is 7").calls == ()
    assert turn("<tool_call>").calls == ()
    broken = turn('<tool_call>{"name": "calc", "arguments": {"text": 3+4}}</tool_call>')
    assert broken.calls == ()


def test_what_an_environment_says_first_ends_the_last_user_turn() -> None:
    talk = talk_of(tokenizer_of("own"))
    assert "user\n3+4 please<end_of_turn>" in talk.prompt(prompt("3+4"), " please")
    text = Prompt(Row("d", 1, {}), None, "3+4", None)
    assert talk.prompt(text, None) == talk.prompt(prompt("3+4"), None)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "does not show the tool calc"),
        (
            "{{ tools }}{% for m in messages if m['role'] != 'tool' %}{{ m['content'] }}{% endfor %}",
            "what a tool answers",
        ),
        (
            "{{ tools }}{% for m in messages if m['role'] == 'tool' %}{{ raise_exception('never') }}{% endfor %}",
            "never",
        ),
        ("{{ tools }}{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}", "otherwise"),
    ],
)
def test_templates_without_tools_are_refused(template: str, said: str) -> None:
    tokenizer = tokenizer_of("own")
    tokenizer.chat_template = template
    with pytest.raises(FtcliError, match=said) as error:
        talk_of(tokenizer)
    assert error.value.findings[0].code == "FT473"
