"""One rendering tells what all prefixes of a conversation are, or says that it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ftcli.assets import asset
from ftcli.data.chat_prefixes import PrefixRenderer, compiled, writes_in_order
from tests.unit.data.official import NAMES, Official

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end_of_turn>{% endfor %}"
ASKED = "{% if add_generation_prompt %}assistant: {% endif %}"


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    lead = [] if system is None else [{"role": "system", "content": system}]
    return lead + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def compare(tokenizer: PreTrainedTokenizerBase, chats: Sequence[list[dict[str, Any]]]) -> int:
    """How many of the conversations are rendered once; each of their prefixes is what transformers makes of it."""

    def render(messages: Sequence[Any], generation_prompt: bool) -> str:
        return str(
            tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation_prompt)
        )

    renderer, count = PrefixRenderer(tokenizer, str(tokenizer.chat_template), {}), 0
    for messages in chats:
        found = renderer.prefixes(messages, render)
        if found is None:
            continue
        count += 1
        for end in range(1, len(messages) + 1):
            for prompt in (False, True):
                assert found.of(end, generation_prompt=prompt) == render(messages[:end], prompt)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_under_official_templates_are_those_of_transformers(name: str) -> None:
    compare(
        Official(name).tokenizer,
        [
            chat("q", "a", "r", "b"),
            chat("q <tool_response>", "<think>\nso\n</think>\n\na", " r ", "b\n"),
            chat("q", "a", "r", "b", system="s"),
            chat("q", "a", "r", "b", system=""),
        ],
    )


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "llama3_1", "gemma3"])
def test_templates_that_write_message_after_message_are_rendered_once(name: str) -> None:
    assert compare(Official(name).tokenizer, [chat("q", "a", "r", "b"), chat("q", "a", system="s")] * 2) == 4


@pytest.mark.parametrize(
    "template",
    [
        # What is written at the end depends on what came before: on the very words, which no first look can tell.
        "{% set ns = namespace(x=0) %}{% for m in messages %}{{ m.content }}{% if 'x' in m.content %}"
        "{% set ns.x = 1 %}{% endif %}{% endfor %}{% if ns.x %}!{% endif %}" + ASKED,
        PLAIN + "{% if 'x' in messages[-1].content %}!{% endif %}" + ASKED,
        PLAIN + "{% if 'x' in messages[0].content %}!{% endif %}" + ASKED,
        # A message is written otherwise before others, or where a prompt follows.
        "{% for m in messages %}{{ m.content }}{% if 'x' in m.content and loop.last %}!{% endif %}{% endfor %}" + ASKED,
        "{% for m in messages %}{{ m.content }}{% if 'x' in m.content and not loop.nextitem %}!{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if 'x' in m.content and add_generation_prompt %}!{% endif %}"
        "{% endfor %}" + ASKED,
        "{% for m in messages %}{{ m.content }}{% if 'x' in m.content %}{{ messages | length }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% if 'x' in m.content %}{{ loop.revindex }}{% endif %}{% endfor %}",
        # Another loop is the one that writes, or nothing is written where the loop is.
        "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}" + ASKED,
        "{% macro say(ms) %}{% for m in ms %}{{ m.content }}{% endfor %}{% endmacro %}{{ say(messages) }}" + ASKED,
        "{% set ms = messages | list %}{% for m in ms %}{{ m.content }}{% endfor %}" + ASKED,
        "{% set ms = messages %}{% if 'x' in messages[0].content %}{% set ms = messages | reverse | list %}{% endif %}"
        "{% for m in ms %}{{ m.content }}{% endfor %}" + ASKED,
        "{% for m in messages if 'x' not in m.content %}{{ m.content }}{% else %}none{% endfor %}" + ASKED,
        "{% for m in messages %}{% if 'x' in m.content %}{% break %}{% endif %}{{ m.content }}{% endfor %}" + ASKED,
        "{% for m in messages | rejectattr('content', 'equalto', 'x') %}{{ m.content }}{% endfor %}" + ASKED,
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}" + ASKED,
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages[:-1] %}"
        "{% endif %}{% for m in rest %}{{ m.content }}{% endfor %}" + ASKED,
        "{{ messages }}" + PLAIN + ASKED,
        PLAIN + "{{ messages == [] }}" + ASKED,
        "{% if 'x' in (messages | map(attribute='content')) %}!{% endif %}" + PLAIN + ASKED,
        "{% if messages.index(messages[0]) == 0 %}{{ messages.copy() }}{% endif %}" + PLAIN + ASKED,
    ],
)
def test_what_only_the_words_decide_is_seen(template: str) -> None:
    """The first conversation shows nothing of it, and others have the same shape."""
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    tokenizer.chat_template = template
    compare(
        tokenizer,
        [
            chat("q", "a", "r", "b"),
            chat("x", "a", "r", "b"),
            chat("q", "x", "r", "b"),
            chat("q", "a", "x", "b"),
            chat("q", "a", "r", "x"),
        ],
    )


def test_what_is_decided_by_messages_that_were_shown_is_rendered_once() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set rest = messages[1:] %}"
        "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
        "{% if loop.index0 and messages[loop.index0 - 1].content == 'x' %}!{% endif %}"
        "{% if m.role == 'user' and loop.first %}?{% endif %}{{ m.content }}<end_of_turn>{% endfor %}" + ASKED
    )
    chats = [chat("q", "a", "r", "b"), chat("x", "a", "x", "b"), chat("q", "a", system="s"), chat("x", "a", system="s")]
    assert compare(tokenizer, chats) == 4


def test_a_refusal_is_left_to_who_renders_one_by_one() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content == 'x' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
        "{% endfor %}" + ASKED
    )
    assert compare(tokenizer, [chat("q", "a"), chat("x", "a"), chat("r", "b")]) == 2


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (PLAIN + ASKED, True),
        ("{{ bos_token }}{% set ms = messages[1:] %}{% for m in ms %}{{ m.content }}{% endfor %}" + ASKED, True),
        (PLAIN, True),
        ("{{ add_generation_prompt }}" + PLAIN, False),
        ("{% block b %}" + PLAIN + "{% endblock %}", False),
        ("{% if true %}" + PLAIN + "{% endif %}", False),
        (PLAIN + "{{ messages[0].content }}", False),
    ],
)
def test_the_tree_of_a_template_tells_whether_one_rendering_is_enough(template: str, expected: bool) -> None:
    found = compiled(template)
    assert found is not None, "transformers compiles templates elsewhere: look for its new way"
    assert writes_in_order(found.environment, template) is expected
