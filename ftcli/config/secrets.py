"""Finds and masks secrets. They do not belong in recipes, which end up in run directories, bug reports and git."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

#: Keys that name a secret. `tokenizer`, `pad_token` and the like do not match.
_SECRET_KEY = re.compile(
    r"(?i)(?:(?:[a-z0-9]+_)*(?:api|access|auth|secret|private|hf|hub|huggingface|wandb|openai|use_auth)_?(?:token|key)"
    r"|token|apikey|(?:[a-z0-9]+_)*(?:password|passwd|secret|credentials?|authorization))"
)

#: Values that are recognisably somebody's credential, whatever the key.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}|xox[abpr]-[A-Za-z0-9-]{10,})"
    # The password of an address: what is between the colon after the user's name and the @.
    r"|(?<=://)[^\s/@:?#]{0,100}:[^\s/@?#]{1,200}(?=@)"
)
#: Where YAML names a value, and where it takes one by its name.
_ANCHOR = re.compile(r"(?<![^\s\[{,:-])&([^\s,\[\]{}]+)")
_ALIAS = re.compile(r"(?<![^\s\[{,:-])\*([^\s,\[\]{}]+)")

#: A key begins where a word does: otherwise every letter of a long word would be tried, which takes minutes.
_ASSIGNMENT = re.compile(r"(?<![A-Za-z0-9_.\-])(?P<key>[A-Za-z0-9_.\-]+)(?P<between>[\"']?\s*[:=]\s*)")


def is_secret_key(key: str) -> bool:
    """True if a key of this name holds a secret."""
    return _SECRET_KEY.fullmatch(key.replace("-", "_")) is not None


def is_secret_value(text: str) -> bool:
    """True if this text contains a credential of a known form."""
    return _SECRET_VALUE.search(text) is not None


def mask(line: str, anchors: Collection[str] = ()) -> str:
    """`line` with every secret replaced by as many asterisks, so that columns stay where they were. ``anchors``: names
    by which the values of keys that name secrets are taken from elsewhere.
    """
    end = _secret_from(line, anchors)
    shown, hidden = (line, "") if end is None else (line[:end], _starred(line[end:]))
    return _SECRET_VALUE.sub(lambda found: "*" * len(found.group()), shown) + hidden


def mask_lines(lines: Sequence[str]) -> list[str]:
    """:func:`mask` of the lines of a file, and all of what stands below a key that names a secret."""
    masked, hidden = _masked(lines, ())
    anchors = {name for text in hidden for name in _ALIAS.findall(text)}
    return _masked(lines, anchors)[0] if anchors else masked


def _masked(lines: Sequence[str], anchors: Collection[str]) -> tuple[list[str], list[str]]:
    """The lines, masked, and what stands where the keys of secrets have their values."""
    masked: list[str] = []
    hidden: list[str] = []
    inside: int | None = None  # the column of the key whose value goes on
    for line in lines:
        column = len(line) - len(line.lstrip())
        item = inside is not None and column == inside and line[column:].startswith("-")
        if inside is not None and line.strip() and column <= inside and not item:
            inside = None
        if inside is not None:
            masked.append(line[:column] + _starred(line[column:]))
            hidden.append(line)
            continue
        masked.append(mask(line, anchors))
        begin = _secret_from(line, anchors)
        if begin is not None:
            hidden.append(line[begin:])
            rest = line[column:]
            inside = column + (len(rest) - len(rest[1:].lstrip()) if rest.startswith("- ") else 0)
    return masked, hidden


def _secret_from(line: str, anchors: Collection[str]) -> int | None:
    """Start of the value of the first key that names a secret, or of the first of ``anchors``; it may hold commas and
    brackets, so it has no end.
    """
    keys = (m.end() for m in _ASSIGNMENT.finditer(line) if is_secret_key(m["key"].rpartition(".")[2]))
    named = (m.end() for m in _ANCHOR.finditer(line) if m[1] in anchors) if anchors else iter(())
    return min((end for end in (next(keys, None), next(named, None)) if end is not None), default=None)


def _starred(text: str) -> str:
    return "".join(c if c.isspace() else "*" for c in text)
