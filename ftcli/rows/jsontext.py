"""JSON as rows hold it, read so that nothing of it is lost."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ftcli.plain import JsonObject


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is no JSON, and for a key that an object has twice (of which Python's ``json`` would
    keep the last); RecursionError for values nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice, and only one of its values could be used")
    return made
