"""The tokenizer as llama.cpp reads it: pieces, their kinds, and merges or scores, from what tokenizer.json says.

Two kinds are written. Byte-level BPE (``gpt2``: Llama 3, Qwen, Mistral's Tekken) has merges, and cuts text by a regular
expression that llama.cpp knows by a name. Merges of text with spaces as ``▁`` and bytes where all else fails
(``llama``: Llama 2, Mistral, Gemma) are told by scores: of the pairs that make a piece, the best score is joined first.
Of Gemma-4 llama.cpp reads the merges themselves (``gemma4``). :func:`pieces_of` cuts text by what a file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftcli.gguf import Value, no_place
from ftcli.plain import JsonMap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The tags of a chat template that only training reads.
_BEGIN = re.compile(r"\{%([-+]?)\s*generation\s*([-+]?)%\}")
_END = re.compile(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}")
#: Kinds of tokens, by llama.cpp's numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_LED = r"[^\r\n\p{L}\p{N}]?"
_BLANKS = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
#: llama.cpp's name of the regular expression by which a byte-level tokenizer cuts text.
PRE_TOKENIZERS: Mapping[str, str] = MappingProxyType(
    {
        rf"{_CONTRACTIONS}\p{{N}}{{1,3}}|{_SPACES}": "llama-bpe",
        rf"{_CONTRACTIONS}\p{{N}}|{_SPACES}": "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+": "qwen35",
        rf"{_LED}{_CASED}|{_LED}{_UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "tekken",
        rf"{_LED}{_CASED}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|{_LED}{_UPPER}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": "gpt-4o",
        rf"{_CONTRACTIONS}\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+": "seed-coder",
        rf"{_CONTRACTIONS}\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_BLANKS}|\s{{1}}": "jais-2",
        "": "gpt-2",
    }
)
#: Its names of the same where merges are tried first (OLMo 2), and where each digit is cut off before (StarCoder 2).
_MERGED_FIRST: Mapping[str, str] = MappingProxyType({"llama-bpe": "dbrx"})
_DIGITS = "starcoder"
#: Names under which llama.cpp takes a piece that is in the vocabulary without trying merges, and puts bos in front.
_IGNORE_MERGES = ("llama-bpe", "tekken")
#: Two pieces that never stand side by side in UTF-8: llama.cpp wants merges, and a vocabulary of bytes has none.
NO_MERGE = "ÿ ÿ"
_SPACE = "▁"


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], size: int, merges_as: str | None = None
) -> dict[str, Value]:
    """The metadata of training's tokenizer, for a model of ``size`` embeddings.

    Args:
        stops: Ids that end a turn; the first is eos.
        merges_as: llama.cpp's name for merges with spaces as ``▁``, where the family has one (``Architecture.merges``).

    Raises FtcliError FT756 for a tokenizer that llama.cpp does not have.
    """
    stated = _stated(tokenizer)
    model: JsonMap = stated["model"]
    if model.get("type") != "BPE":
        raise no_place(f"its tokenizer is {model.get('type')}, and ftcli writes BPE")
    tokens, types = _pieces(stated, tokenizer, size)
    merges = [" ".join(pair) if isinstance(pair, list) else str(pair) for pair in model.get("merges") or ()]
    byte_level = _is_byte_level(stated)
    values = _byte_level(stated, merges) if byte_level else _scored(stated, merges, tokens, types)
    if merges_as is not None and not byte_level:
        if values.pop("tokenizer.ggml.add_space_prefix"):
            raise no_place("its tokenizer puts a space before text")
        values |= {"tokenizer.ggml.model": merges_as, "tokenizer.ggml.merges": merges or [NO_MERGE]}
        values["tokenizer.ggml.add_space_prefix"] = False
        del values["tokenizer.ggml.pre"]
    values["tokenizer.ggml.tokens"] = tokens
    values["tokenizer.ggml.token_type"] = types
    return {**values, **values_of_special(tokenizer, stops)}


def _stated(tokenizer: PreTrainedTokenizerBase) -> JsonMap:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise no_place("its tokenizer has no tokenizer.json")
    stated: JsonMap = json.loads(backend.to_str())
    return stated


def _pieces(stated: JsonMap, tokenizer: PreTrainedTokenizerBase, size: int) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    known = {**stated["model"]["vocab"], **{added["content"]: added["id"] for added in stated["added_tokens"]}}
    if max(known.values()) >= size:
        raise no_place(f"its tokenizer has {max(known.values()) + 1} tokens and its embeddings {size} rows")
    unknown = stated["model"].get("unk_token")
    fallback = bool(stated["model"].get("byte_fallback"))
    for token, index in known.items():
        is_byte = fallback and len(token) == 6 and token.startswith("<0x")
        tokens[index] = token
        types[index] = UNKNOWN if token == unknown else BYTE if is_byte else NORMAL
    special = set(tokenizer.all_special_ids)
    for added in stated["added_tokens"]:
        index = added["id"]
        if types[index] == UNKNOWN:
            continue
        control = added["special"] or index in special
        types[index] = CONTROL if control else USER_DEFINED
        if not control:  # it is looked for in the text before spaces are written otherwise
            tokens[index] = tokens[index].replace(_SPACE, " ")
    return tokens, types


def _steps(section: Any) -> list[JsonMap]:
    """The parts of a normaliser, pre-tokenizer or post-processor, in their order."""
    if not section:
        return []
    for key in ("pretokenizers", "normalizers", "processors", "decoders"):
        if section.get("type") == "Sequence" and key in section:
            return [step for part in section[key] for step in _steps(part)]
    return [section]


def _is_byte_level(stated: JsonMap) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(stated["pre_tokenizer"]))


def _byte_level(stated: JsonMap, merges: list[str]) -> dict[str, Value]:
    if _steps(stated["normalizer"]) not in ([], [{"type": "NFC"}]):
        raise no_place("its tokenizer rewrites text before it cuts it")
    pre = _pre_tokenizer(stated, merges)
    if bool(stated["model"].get("ignore_merges")) != (pre in _IGNORE_MERGES) and merges:
        raise no_place(f"its tokenizer is like {pre} in how it cuts text, and not in ignore_merges")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.merges": merges or [NO_MERGE],
    }


def _pre_tokenizer(stated: JsonMap, merges: list[str]) -> str:
    """llama.cpp's name of how text is cut; where nothing is merged, it does not matter."""
    if not merges:
        return "gpt-2"
    steps = _steps(stated["pre_tokenizer"])
    patterns = [step["pattern"].get("Regex") for step in steps if step["type"] == "Split"]
    digits = [step for step in steps if step["type"] == "Digits" and step.get("individual_digits")]
    (level,) = [step for step in steps if step["type"] == "ByteLevel"]
    if level.get("add_prefix_space") or len(steps) != len(patterns) + len(digits) + 1 or len(steps) > 2:
        raise no_place("its tokenizer cuts text in a way that llama.cpp has no name for here")
    pattern = patterns[0] if patterns else ""
    found = PRE_TOKENIZERS.get(str(pattern))
    if found is None or bool(pattern) == bool(level.get("use_regex", True)):
        raise no_place(f"its tokenizer cuts text by {pattern!r}, which ftcli has no name of llama.cpp's for")
    if digits:
        return _DIGITS
    return found if stated["model"].get("ignore_merges") else _MERGED_FIRST.get(found, found)


def _scored(stated: JsonMap, merges: list[str], tokens: list[str], types: list[int]) -> dict[str, Value]:
    if not stated["model"].get("byte_fallback"):
        raise no_place("its tokenizer has neither bytes as pieces nor a fallback to them")
    scores = [-1000.0 if kind in (CONTROL, USER_DEFINED, UNUSED) else 0.0 for kind in types]
    ids = {token: index for index, token in enumerate(tokens)}
    seen: set[int] = set()
    for rank, merge in enumerate(merges):
        index = ids.get(merge.replace(" ", "", 1) if not merge.startswith(" ") else merge)
        if index is not None and index not in seen:
            seen.add(index)
            scores[index] = -float(rank + 1)
    # What no merge makes is a single character, and never joined.
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": _prefixed(stated),
    }


def _prefixed(stated: JsonMap) -> bool:
    """True if a space is put before text."""
    for step in _steps(stated["normalizer"]):
        if step["type"] == "Prepend":
            return bool(step.get("prepend") == _SPACE)
    for step in _steps(stated["pre_tokenizer"]):
        if step["type"] == "Metaspace":
            return str(step.get("prepend_scheme", "always")) != "never"
    return False


def values_of_special(tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> dict[str, Value]:
    """The metadata of special tokens and the template, which no kind of tokenizer has otherwise."""
    eos = int(tokenizer.eos_token_id)
    values: dict[str, Value] = {"tokenizer.ggml.eos_token_id": eos}
    others = [stop for stop in stops if stop != eos]
    for key, stop in zip(("eot", "eom"), others, strict=False):
        values[f"tokenizer.ggml.{key}_token_id"] = int(stop)
    for key, index in (
        ("bos", tokenizer.bos_token_id),
        ("padding", tokenizer.pad_token_id),
        ("unknown", tokenizer.unk_token_id),
    ):
        if index is not None:
            values[f"tokenizer.ggml.{key}_token_id"] = int(index)
    plain = list(tokenizer("a")["input_ids"])
    values["tokenizer.ggml.add_bos_token"] = tokenizer.bos_token_id is not None and plain[0] == tokenizer.bos_token_id
    values["tokenizer.ggml.add_eos_token"] = plain[-1] == eos
    template = tokenizer.chat_template
    return values | (
        {"tokenizer.chat_template": served_template(template)} if isinstance(template, str) and template else {}
    )


def served_template(template: str) -> str:
    """``template`` with its generation blocks as blocks that always hold: it renders the same text in any Jinja."""
    return _END.sub(r"{%\1 endif \2%}", _BEGIN.sub(r"{%\1 if true \2%}", template))


def pieces_of(values: JsonMap, text: str) -> list[int]:
    """The tokens of ``text``, special ones in it taken as such, without bos and eos."""
    tokens: Sequence[str] = values["tokenizer.ggml.tokens"]
    kinds = values["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    whole = sorted((t for t, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)), key=len)
    pattern = "|".join(re.escape(token) for token in reversed(whole))
    parts = re.split(f"({pattern})", text) if whole else [text]
    by_scores = values["tokenizer.ggml.model"] == "llama"
    cut = _WAYS[str(values["tokenizer.ggml.model"])](values, ids)
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


def _merges(values: JsonMap, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs that are pieces and make one."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in values["tokenizer.ggml.merges"])]
    return [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]


def _patterns() -> dict[str, str]:
    """The regular expression of each of llama.cpp's names."""
    patterns = {name: pattern for pattern, name in PRE_TOKENIZERS.items()}
    return patterns | {name: patterns[other] for other, name in _MERGED_FIRST.items()} | {_DIGITS: ""}


def _by_merges(values: JsonMap, ids: Mapping[str, int]) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    known, pre = _merges(values, ids), values["tokenizer.ggml.pre"]
    pattern = _patterns()[pre]
    tokenizer = Tokenizer(models.BPE(vocab=dict(ids), merges=known, ignore_merges=pre in _IGNORE_MERGES))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern and bool(known))
    split: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    split += [pre_tokenizers.Digits(individual_digits=True)] if pre == _DIGITS else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _by_merges_of_lines(values: JsonMap, ids: Mapping[str, int]) -> Any:
    """Merges within lines; several line ends are one piece where there is such a one."""
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.BPE(vocab=dict(ids), merges=_merges(values, ids), byte_fallback=True))

    def cut(text: str) -> list[int]:
        found: list[int] = []
        for line in re.findall(r"[^\n]+|\n+", text.replace(" ", _SPACE)):
            found += [ids[line]] if line in ids and not line.strip("\n") else tokenizer.encode(line).ids
        return found

    return cut


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


_WAYS = {"llama": _by_scores, "gemma4": _by_merges_of_lines, "gpt2": _by_merges}


def is_known(values: JsonMap) -> bool:
    """True if :func:`pieces_of` cuts text as a file says; what llama.cpp's converter writes may be of another kind."""
    model = values["tokenizer.ggml.model"]
    return model in _WAYS and (model != "gpt2" or values.get("tokenizer.ggml.pre") in _patterns())
