"""Reading plain values from JSON that may hold anything, and writing them for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from ftcli.plain import JsonMap, JsonObject
from ftcli.units import number

Show = Callable[[float], str]


def map_in(value: JsonMap, key: str) -> JsonObject:
    """The map under ``key``; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def maps(value: object) -> list[JsonObject]:
    """The maps of a list; empty where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float holds; true and false are none, and neither are NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number_or_none(value: object) -> float | None:
    """The number, or None where it is something else."""
    return float(value) if is_number(value) else None


def numbers_of(lines: Sequence[JsonMap], key: str) -> list[float]:
    """The values of ``key`` in those lines that have one."""
    return [value for line in lines if (value := number_or_none(line.get(key))) is not None]


def percent(value: float) -> str:
    """A share as ``12.3%``."""
    return f"{100 * value:.1f}%"


def count(value: object) -> str:
    """An integer as ``1,234``."""
    return f"{value:,}" if isinstance(value, int) else "–"


def as_words(name: str) -> str:
    """``exact_match`` as ``Exact match``."""
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


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
    "as_words",
    "count",
    "is_number",
    "map_in",
    "maps",
    "number",
    "number_or_none",
    "numbers_of",
    "percent",
]
