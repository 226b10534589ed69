"""Values as JSON has them. Results are dataclasses; here alone they become maps, for stdout and for files. What files
hold, which may be anything, is asked for here too."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

#: A map as JSON or YAML has it, whose keys and values are somebody else's: a model's config.json, a row of data, a file
#: that an earlier process wrote. Also what a value says of itself for such a file. What is ours has a type instead.
JsonObject: TypeAlias = dict[str, Any]
#: The same, where it is only read.
JsonMap: TypeAlias = Mapping[str, Any]

#: Metadata of a dataclass's field (``field(metadata=...)``): without a value (None, nothing in it) its key is left out.
LEFT_OUT = MappingProxyType({"plain": "left out without a value"})
#: Its own fields stand among those of its owner; without a value there are none.
FLATTENED = MappingProxyType({"plain": "flattened"})
#: Its keys are names that somebody gave, of tasks for instance.
NAMED = MappingProxyType({"plain": "keys are names"})


class Name(str):
    """A key that is a name: for people it is shown as it is, where words are made of our own keys."""

    __slots__ = ()


#: Beyond this nothing is counted or measured; squares and sums of it would overflow, in charts for instance.
_LARGEST = 1e100


@runtime_checkable
class Documented(Protocol):
    """A value with a JSON form of its own, other than field by field."""

    def as_dict(self) -> JsonObject:
        """The JSON form; the values need not be plain."""
        ...


def plain(value: Any) -> Any:
    """``value`` with maps, lists, text, numbers, booleans and None only; NaN and infinity become None."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_fields(value) if not isinstance(value, Documented) else plain(value.as_dict())
    item = getattr(value, "item", None)  # numpy and torch scalars
    return plain(item()) if callable(item) else str(value)


def plain_fields(value: Any) -> JsonObject:
    """A dataclass's fields by name, as :func:`plain` has them."""
    found: JsonObject = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if field.metadata == FLATTENED:
            found |= {} if item is None else plain(item)
        elif field.metadata == NAMED:
            found[field.name] = {Name(key): plain(each) for key, each in item.items()}
        elif item or field.metadata != LEFT_OUT:
            found[field.name] = plain(item)
    return found


def parsed_map(text: str | bytes) -> JsonObject | None:
    """The map that a text is as JSON; None for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def map_in(value: JsonMap, key: str) -> JsonObject:
    """The map under ``key``; empty where there is none."""
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def maps(value: object) -> list[JsonObject]:
    """The maps of a list; empty where it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def as_unicode(text: str) -> str:
    """The text with a replacement character for each half of a surrogate pair, which no tokenizer and no file takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_number(value: object) -> TypeGuard[int | float]:
    """True for a number that can be shown: true and false are none, and neither are NaN, infinity and 1e308."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def number_or_none(value: object) -> float | None:
    """The number, or None where it is something else."""
    return float(value) if is_number(value) else None


def numbers_of(lines: Sequence[JsonMap], key: str) -> list[float]:
    """The values of ``key`` in those lines that have one."""
    return [value for line in lines if (value := number_or_none(line.get(key))) is not None]
