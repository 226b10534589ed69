"""Looks at a tokenizer's files in a local folder, without loading the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.errors import Finding, Origin
from ftcli.facts.config_file import preflight_error, read_json
from ftcli.paths import OPEN_IT, why_closed
from ftcli.plain import JsonObject

_MAX_TOKENIZER_BYTES = 256 * 2**20
_OTHER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer whose files are on this machine. ``size`` is one more than its largest id; None where only other
    files than tokenizer.json say it.
    """

    folder: Path
    size: int | None
    has_chat_template: bool
    eos_token: str | None
    pad_token: str | None


def inspect_tokenizer(folder: Path, origin: Origin | None) -> TokenizerFacts:
    """The facts of the tokenizer in ``folder``.

    Raises FtcliError (exit 3): FT321 when there is none, FT305 when a file of it is not JSON.
    """
    path = folder / "tokenizer_config.json"
    closed = why_closed(folder)
    if closed is not None:
        raise preflight_error("FT321", f"{folder} cannot be read: {closed}", origin, help=OPEN_IT)
    if not path.is_file() and not any((folder / name).is_file() for name in _OTHER_FILES):
        message = f"no tokenizer in {folder}"
        help = "copy the model's tokenizer files into it, name another with model.tokenizer, or use `bytes`"
        raise preflight_error("FT321", message, origin, help=help)
    config = read_json(path, origin) if path.is_file() else {}
    specials = folder / "special_tokens_map.json"
    config = {**(read_json(specials, origin) if specials.is_file() else {}), **config}
    return TokenizerFacts(
        folder=folder,
        size=_size(folder / "tokenizer.json", origin, _specials(config)),
        has_chat_template=bool(config.get("chat_template")) or (folder / "chat_template.jinja").is_file(),
        eos_token=_text(config.get("eos_token")),
        pad_token=_text(config.get("pad_token")),
    )


def _specials(config: JsonObject) -> set[str]:
    """The special tokens that a tokenizer's settings name."""
    more = config.get("additional_special_tokens")
    values = [config.get(f"{name}_token") for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    found = [_text(value) for value in (*values, *(more if isinstance(more, list) else []))]
    return {text for text in found if text is not None}


def _size(path: Path, origin: Origin | None, specials: set[str]) -> int | None:
    """One more than the largest id. Special tokens that are no tokens yet get further ones when it is loaded."""
    known = vocabulary(path, origin)
    return max(known) + 1 + len(specials - set(known.values())) if known else None


def vocabulary(path: Path, origin: Origin | None) -> dict[int, str]:
    """The tokens in a tokenizer.json by their ids; empty where there is no such file, or it says none.

    Raises FtcliError FT305 (exit 3) where it is not JSON.
    """
    if not path.is_file():
        return {}
    values = read_json(path, origin, limit=_MAX_TOKENIZER_BYTES)
    model, added = values.get("model"), values.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found: dict[int, str] = {}
    if isinstance(vocab, dict):
        found = {number: token for token, number in vocab.items() if isinstance(number, int)}
    elif isinstance(vocab, list):
        pairs = (pair if isinstance(pair, list) and pair else [""] for pair in vocab)
        found = {number: pair[0] if isinstance(pair[0], str) else "" for number, pair in enumerate(pairs)}
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and isinstance(token.get("id"), int):
            found[token["id"]] = str(token.get("content"))
    return found


def foreign_tokens(ours: Mapping[int, str], theirs: Mapping[int, str], ids: Iterable[int]) -> str:
    """Those of ``ids`` that are not the same token in both vocabularies, in words; empty where all are."""
    other = [number for number in ids if ours.get(number) != theirs.get(number)]
    if not other:
        return ""
    first = min(other)
    what = [repr(each[first]) if first in each else "no token" for each in (theirs, ours)]
    return f"{len(other):,} of its tokens are others: id {first} is {what[0]} there and {what[1]} here"


def foreign_tokens_finding(name: str, said: str, origin: Origin | None = None) -> Finding:
    """FT326 for another model that would read other tokens than the trained one; ``said`` by :func:`foreign_tokens`."""
    message = f"{name} does not have the tokens of the model that is trained: {said}"
    help = "compare with a model of the same tokenizer, such as another fine-tune of the same base"
    return Finding("FT326", message, origin, help)


def _text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def no_stop_finding(where: str, origin: Origin | None = None) -> Finding:
    """FT322 for a tokenizer without an end-of-sequence token; ``where`` it is, as words for people."""
    message = f"the tokenizer {where} has no end-of-sequence token, so a model could never learn to stop"
    return Finding("FT322", message, origin, "set eos_token in its tokenizer_config.json")


def no_template_finding(origin: Origin | None) -> Finding:
    """FT421 for conversations under a tokenizer without a chat template."""
    message = "the tokenizer has no chat template, so a conversation has no defined text"
    help = "name one with data.chat_template, or train on rows of format prompt_completion or text"
    return Finding("FT421", message, origin, help)
