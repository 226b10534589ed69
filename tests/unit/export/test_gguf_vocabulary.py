"""Tokenizers in GGUF files: what is written cuts text as the tokenizer does, under a name that llama.cpp has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ftcli.errors import FtcliError
from ftcli.export.gguf.vocabulary import PRE_TOKENIZERS, pieces_of, vocabulary_of
from ftcli.export.verify import TEXTS

pytest.importorskip("gguf")

#: Several digits, blanks, line ends and contractions, where the ways to cut differ.
LEARNT = [
    *TEXTS,
    "In 1999, it's 12345 + 67890 = 80235;   I'LL go.\r\n\r\n    if x:\n\t\treturn 3.14159 ",
    "don't   stop\n\n\n",
] * 4
NAMED: dict[str, tuple[str, bool, bool]] = {
    **{name: (pattern, False, name in ("llama-bpe", "tekken")) for pattern, name in PRE_TOKENIZERS.items()},
    "dbrx": (next(pattern for pattern, name in PRE_TOKENIZERS.items() if name == "llama-bpe"), False, False),
    "starcoder": ("", True, False),
}


def learnt(pattern: str, *, digits: bool = False, ignore_merges: bool = False) -> Any:
    """A tokenizer of bytes with merges that are learnt from the texts."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    first: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    first += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(LEARNT, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", NAMED)
def test_text_is_cut_alike_by_what_is_written(name: str) -> None:
    pattern, digits, ignoring = NAMED[name]
    tokenizer = learnt(pattern, digits=digits, ignore_merges=ignoring)
    values = vocabulary_of(tokenizer, [1], 640)
    assert values["tokenizer.ggml.pre"] == name
    for text in LEARNT:
        assert pieces_of(values, text) == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(("family", "name"), [("qwen2", "qwen2"), ("qwen3_5", "qwen35")])
def test_a_familys_own_expression_has_its_name(family: str, name: str) -> None:
    """Qwen3.5 leaves marks beside their letters, where Qwen2 cuts in Devanagari."""
    own = pytest.importorskip(f"transformers.models.{family}.tokenization_{family}")
    assert PRE_TOKENIZERS[own.PRETOKENIZE_REGEX] == name
    cut = learnt(own.PRETOKENIZE_REGEX).backend_tokenizer.pre_tokenizer.pre_tokenize_str("नमस्ते")
    assert len(cut) == (1 if name == "qwen35" else 3)


def test_names_stand_for_different_ways_to_cut() -> None:
    cut = {
        name: tuple(learnt(p, digits=d, ignore_merges=i)(LEARNT[-2])["input_ids"]) for name, (p, d, i) in NAMED.items()
    }
    assert len({cut[name] for name in ("gpt-2", "starcoder", "qwen2", "dbrx")}) == 4


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"pattern": r"\p{L}+|\S|\s"}, "no name of llama.cpp's for"),
        ({"pattern": next(iter(PRE_TOKENIZERS)), "digits": True}, "in a way that llama.cpp has no name for"),
        ({"pattern": "", "ignore_merges": True}, "is like gpt-2 in how it cuts text, and not in ignore_merges"),
    ],
)
def test_other_ways_are_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(FtcliError, match=reason) as caught:
        vocabulary_of(learnt(**values), [1], 640)
    assert caught.value.findings[0].code == "FT756"


def of_lines() -> Any:
    """A tokenizer as Gemma-4 has it: merges over words, spaces as ``▁``, bytes where all else fails."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Replace("▁", " ")
    lines = [line for text in LEARNT for line in text.split("\n")]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "\n\n", "\n\n\n"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = made["added_tokens"][:4]
    made["model"]["merges"] = [["\n", "\n"], ["\n\n", "\n"], *made["model"]["merges"]]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def test_merges_of_gemma4_are_written_as_they_are() -> None:
    tokenizer = of_lines()
    values = vocabulary_of(tokenizer, [1], 640, "gemma4")
    assert values["tokenizer.ggml.model"] == "gemma4"
    assert values["tokenizer.ggml.merges"] == [
        " ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    ]
    assert "tokenizer.ggml.pre" not in values
    for text in [*LEARNT, "Zwölf 🚀 नमस्ते"]:
        found = pieces_of(values, text)
        assert tokenizer.decode(found) == tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert found == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert vocabulary_of(tokenizer, [1], 640)["tokenizer.ggml.model"] == "llama"
