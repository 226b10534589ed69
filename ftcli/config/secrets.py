"""Finds and masks secrets. They do not belong in recipes, which end up in run directories, bug reports and git."""

from __future__ import annotations

import re

#: Keys that name a secret. `tokenizer`, `pad_token` and the like do not match.
_SECRET_KEY = re.compile(
    r"(?i)(?:(?:[a-z0-9]+_)*(?:api|access|auth|secret|private|hf|hub|huggingface|wandb|openai|use_auth)_?(?:token|key)"
    r"|token|apikey|(?:[a-z0-9]+_)*(?:password|passwd|secret|credentials?))"
)

#: Values that are recognisably somebody's credential, whatever the key.
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}|xox[abpr]-[A-Za-z0-9-]{10,})"
)

_ASSIGNMENT = re.compile(r"(?P<key>[A-Za-z0-9_.\-]+)(?P<between>[\"']?\s*[:=]\s*)(?P<value>[^\s,{}\[\]][^,}\]]*)")


def is_secret_key(key: str) -> bool:
    """Whether a key of this name holds a secret."""
    return _SECRET_KEY.fullmatch(key.replace("-", "_")) is not None


def is_secret_value(text: str) -> bool:
    """Whether this text contains a credential of a known form."""
    return _SECRET_VALUE.search(text) is not None


def mask(line: str) -> str:
    """`line` with every secret replaced by as many asterisks, so that columns stay where they were."""
    line = _SECRET_VALUE.sub(lambda found: "*" * len(found.group()), line)
    return _ASSIGNMENT.sub(_mask_assignment, line)


def _mask_assignment(found: re.Match[str]) -> str:
    if not is_secret_key(found["key"].rpartition(".")[2]):
        return found.group()
    return found["key"] + found["between"] + "*" * len(found["value"])
