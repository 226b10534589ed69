"""The bundled chat templates, rendered by transformers."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from ftcli.assets import asset

CHAT = [
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "Q2"},
    {"role": "assistant", "content": "A2"},
]
RENDERED = {
    "gemma": "<bos><start_of_turn>user\nQ1<end_of_turn>\n<start_of_turn>model\nA1<end_of_turn>\n"
    "<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\nA2<end_of_turn>\n",
    "chatml": "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
    "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
    "llama3": "<bos><|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>",
    "mistral": "<bos>[INST] Q1[/INST] A1<end_of_turn>[INST] Q2[/INST] A2<end_of_turn>",
}
RENDERED["gemma-system"] = RENDERED["gemma"]
TRAINED = {
    "gemma": "A1<end_of_turn>A2<end_of_turn>",
    "chatml": "A1<|im_end|>A2<|im_end|>",
    "llama3": "A1<|eot_id|>A2<|eot_id|>",
    "mistral": " A1<end_of_turn> A2<end_of_turn>",
    "gemma-system": "A1<end_of_turn>A2<end_of_turn>",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(asset("tokenizers", "bytes"), local_files_only=True)


def template(name: str) -> str:
    return asset("templates", f"{name}.jinja").read_text(encoding="utf-8")


def test_every_bundled_template_is_tested() -> None:
    assert {path.stem for path in asset("templates").glob("*.jinja")} == set(RENDERED)


@pytest.mark.parametrize("name", RENDERED)
def test_a_chat_is_rendered_as_the_model_family_expects(tokenizer: Any, name: str) -> None:
    assert tokenizer.apply_chat_template(CHAT, chat_template=template(name), tokenize=False) == RENDERED[name]


@pytest.mark.parametrize("name", RENDERED)
def test_the_assistant_mask_covers_answers_and_their_ends(tokenizer: Any, name: str) -> None:
    encoded = tokenizer.apply_chat_template(
        CHAT, chat_template=template(name), return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, flag in pairs if flag]) == TRAINED[name]


@pytest.mark.parametrize("name", RENDERED)
def test_earlier_turns_are_never_rewritten(tokenizer: Any, name: str) -> None:
    """What generation sees before an answer is exactly what training saw before it."""
    for turns in (1, 3):
        prompt = tokenizer.apply_chat_template(
            CHAT[:turns], chat_template=template(name), tokenize=False, add_generation_prompt=True
        )
        assert RENDERED[name].startswith(prompt)
        assert RENDERED[name][len(prompt) :].lstrip().startswith(CHAT[turns]["content"])


@pytest.mark.parametrize("name", ["gemma", "mistral"])
@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "system", "content": "S"}, *CHAT], "no system turn"),
        (CHAT[1:], "must alternate"),
        ([CHAT[0], CHAT[0]], "must alternate"),
        ([{"role": "tool", "content": "T"}], "Unknown role tool"),
    ],
)
def test_what_the_model_never_saw_is_refused(tokenizer: Any, name: str, chat: list[Any], message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        tokenizer.apply_chat_template(chat, chat_template=template(name), tokenize=False)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma-system"])
def test_system_turns_are_kept_where_the_family_has_them(tokenizer: Any, name: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert "Be brief." in tokenizer.apply_chat_template(chat, chat_template=template(name), tokenize=False)
