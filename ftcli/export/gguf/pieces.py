"""Cuts text by what a GGUF file says of its tokenizer, in the two ways that llama.cpp does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ftcli.export.gguf.vocabulary import CONTROL, PRE_TOKENIZERS, USER_DEFINED
from ftcli.plain import JsonMap

_SPACE = "▁"


def pieces_of(values: JsonMap, text: str) -> list[int]:
    """The tokens of ``text``, special ones in it taken as such, without bos and eos.

    Args:
        values: The file's metadata.
    """
    tokens: Sequence[str] = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    whole = sorted((t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)), key=len)
    pattern = "|".join(re.escape(token) for token in reversed(whole))
    parts = re.split(f"({pattern})", text) if whole else [text]
    by_scores = values["tokenizer.ggml.model"] == "llama"
    cut = _by_scores(values, ids) if by_scores else _by_merges(values, ids)
    found: list[int] = []
    fresh = True  # a space is put before text at the beginning and after a special token
    for index, part in enumerate(parts):
        if index % 2:
            found.append(ids[part])
            fresh = True
        elif part:
            prefix = " " if by_scores and fresh and values.get("tokenizer.ggml.add_space_prefix") else ""
            found += cut(prefix + part)
            fresh = False
    return found


def _by_merges(values: JsonMap, ids: Mapping[str, int]) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    known = [pair for pair in merges if pair[0] in ids and pair[1] in ids and "".join(pair) in ids]
    pre = values["tokenizer.ggml.pre"]
    (pattern,) = [expression for expression, name in PRE_TOKENIZERS.items() if name == pre]
    model = models.BPE(vocab=dict(ids), merges=known, ignore_merges=pre in ("llama-bpe", "tekken"))
    tokenizer = Tokenizer(model)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern and bool(known))
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _by_scores(values: JsonMap, ids: Mapping[str, int]) -> Any:
    scores = values["tokenizer.ggml.scores"]

    def cut(text: str) -> list[int]:
        symbols = list(text.replace(" ", _SPACE))
        while True:
            best, place = None, -1
            for i in range(len(symbols) - 1):
                index = ids.get(symbols[i] + symbols[i + 1])
                if index is not None and (best is None or scores[index] > best):
                    best, place = scores[index], i
            if place < 0:
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        found: list[int] = []
        for symbol in symbols:
            if symbol in ids:
                found.append(ids[symbol])
            else:
                found += [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return found

    return cut
