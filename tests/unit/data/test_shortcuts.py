"""Rows are the same whether their answers are placed by what is known of tokenizer and template, or by looking."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ftcli.config.data import DataConfig
from ftcli.data import chat_prefixes
from ftcli.data.answers import spells
from ftcli.data.encode import Encoder, TokenizedRows
from ftcli.rows.row import Row
from tests.unit.data.official import Official

PIECES = [
    "a",
    "blue",
    " ",
    "  ",
    "\n",
    "\n\n",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "user",
    "assistant",
    "<|im_end|>",
    "<|im_start|>",
]
PIECES += [
    "<think>",
    "</think>",
    "<eos>",
    "<end_of_turn>",
    "model",
    "ー",
    "\t",
    "1234",
    "'s",
    "<|eot_id|>",
    "\u200d",
    "#",
]


def trained_on(texts: list[str], normalizer: Any, splits: Any, model: Any, specials: list[str]) -> Any:
    made = Tokenizer(model)
    if normalizer is not None:
        made.normalizer = normalizer
    if splits is not None:
        made.pre_tokenizer = splits
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*specials, *(fallback if model.byte_fallback else [])]
    given: Any = {"initial_alphabet": [] if model.byte_fallback else alphabet}
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=700, special_tokens=words, show_progress=False, **given)
    )
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=specials[0], eos_token=specials[0], additional_special_tokens=specials
    )


def tokenizers_of(official: Official) -> dict[str, PreTrainedTokenizerBase]:
    """Byte-level ones with and without normalizer, and one of characters with bytes for those that it lacks."""
    specials = sorted({*official.tokenizer.get_added_vocab()})
    source = random.Random(0)
    texts = ["".join(source.choices(PIECES, k=40)) for _ in range(60)]
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {
        "bytes": official.tokenizer,
        "byte-level": trained_on(texts, None, split, models.BPE(), specials),
        "normalized": trained_on(texts, normalizers.NFC(), pre_tokenizers.ByteLevel(), models.BPE(), specials),
        "characters": trained_on(texts, spaces, None, models.BPE(byte_fallback=True, unk_token="<0x00>"), specials),
    }


def read(tokenizer: PreTrainedTokenizerBase, official: Official, chats: list[Any], *, known: bool) -> TokenizedRows:
    tokenizer.chat_template = official.tokenizer.chat_template
    data = DataConfig.model_validate({"train": ["x"], "max_seq_len": 10**6})
    stops = [int(tokenizer.convert_tokens_to_ids(official.tokenizer.convert_ids_to_tokens(i))) for i in official.stops]
    encoder = Encoder(tokenizer, stops, data, "messages")
    if known:
        assert encoder._boundary._added
    else:
        encoder._boundary._added = {}
    return encoder.rows([Row("f", number, {"messages": chat}) for number, chat in enumerate(chats, 1)])


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen3"])
def test_rows_that_are_placed_by_what_is_known_are_those_that_are_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    official, source = Official(name), random.Random(1)
    chats = [
        [
            {"role": ("user", "assistant")[n % 2], "content": "".join(source.choices(PIECES, k=source.randint(0, 6)))}
            for n in range(2 * source.randint(1, 3))
        ]
        for _ in range(60)
    ]
    for kind, tokenizer in tokenizers_of(official).items():
        assert spells(tokenizer)
        known = read(tokenizer, official, chats, known=True)
        with monkeypatch.context() as patch:
            patch.setattr(chat_prefixes, "writes_in_order", lambda *_: False)
            looked = read(tokenizer, official, chats, known=False)
        assert known == looked, kind
        assert known.tokens
