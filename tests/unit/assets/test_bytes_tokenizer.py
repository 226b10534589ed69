"""The bundled byte-level tokenizer, loaded by plain transformers."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from bytes_tokenizer import FIRST_BYTE_ID, SPECIAL_TOKENS, write_tokenizer
from transformers import AutoTokenizer

from ftcli.assets import asset

TEXTS = [
    "",
    "kano",
    " leading and trailing ",
    "it 's n't , two  spaces . really ?",
    "tabs\tand\r\nnew\n\nlines",
    "Grüße, 你好, שלום, 🙂👩‍👩‍👧, \u0000\u007f\u0080\u00a0\u2028\ufeff\U0010ffff",
    unicodedata.normalize("NFD", "é ñ ﬁ"),
]


@pytest.fixture(scope="module", params=["tokenizers/bytes", "models/tiny-gemma2"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return AutoTokenizer.from_pretrained(asset(*request.param.split("/")), local_files_only=True)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_as_it_was_one_token_a_byte(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [FIRST_BYTE_ID + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token_of_its_own(tokenizer: Any) -> None:
    assert len(tokenizer) == FIRST_BYTE_ID + 256 == 264
    every = "".join(chr(code) for code in range(0x800)) + "\U00010000\U00050000\U00100000"
    seen = set(tokenizer(every, add_special_tokens=False)["input_ids"])
    assert seen <= set(range(FIRST_BYTE_ID, 264))
    assert tokenizer.decode(sorted(seen)[:128]) == "".join(map(chr, range(128)))


def test_special_tokens_are_told_apart(tokenizer: Any) -> None:
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == ("<pad>", "<bos>", "<end_of_turn>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert [tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(FIRST_BYTE_ID))
    assert set(tokenizer.all_special_ids) >= {0, 2, 4}


def test_plain_text_begins_with_one_bos(tokenizer: Any) -> None:
    assert tokenizer("ab")["input_ids"] == [2, FIRST_BYTE_ID + 97, FIRST_BYTE_ID + 98]
    assert tokenizer.decode(tokenizer("ab")["input_ids"], skip_special_tokens=True) == "ab"


def test_chat_has_one_bos_and_trains_answers_with_their_end_of_turn(tokenizer: Any) -> None:
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": " två\n"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    trained = tokenizer.decode([token for token, flag in zip(ids, mask, strict=True) if flag])
    assert trained == " två\n<end_of_turn>four<end_of_turn>"


def test_the_generation_prompt_is_a_prefix_of_the_conversation(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat, tokenize=False)
    assert prompt == "<bos><start_of_turn>user\none<end_of_turn>\n<start_of_turn>model\n"
    assert whole == f"{prompt}two<end_of_turn>\n"


def test_the_committed_files_are_what_the_builder_writes(tmp_path: Path) -> None:
    template = asset("templates", "gemma.jinja").read_text(encoding="utf-8")
    write_tokenizer(tmp_path, template)
    for folder in (asset("tokenizers", "bytes"), asset("models", "tiny-gemma2")):
        for fresh in tmp_path.iterdir():
            assert (folder / fresh.name).read_bytes() == fresh.read_bytes(), fresh.name
