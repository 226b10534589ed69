"""Reading plain values from JSON that may hold anything, and writing them for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ftcli.plain import is_number, map_in, maps, number_or_none, numbers_of
from ftcli.units import number

Show = Callable[[float], str]


def percent(value: float) -> str:
    """A share as ``12.3%``."""
    return f"{100 * value:.1f}%"


def count(value: object) -> str:
    """An integer as ``1,234``."""
    return f"{value:,}" if isinstance(value, int) else "–"


def as_text(value: Any) -> str:
    """A value of a recipe or manifest in a line."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value) or "–"
    if isinstance(value, Mapping):
        kept = {key: item for key, item in value.items() if item not in (None, False, {}, [], ())}
        if set(kept) == {"path"}:  # a dataset of which nothing else is said
            return as_text(kept["path"])
        return ", ".join(f"{key}: {as_text(item)}" for key, item in kept.items()) or "–"
    return str(value)


__all__ = [
    "Show",
    "as_text",
    "count",
    "is_number",
    "map_in",
    "maps",
    "number",
    "number_or_none",
    "numbers_of",
    "percent",
]
