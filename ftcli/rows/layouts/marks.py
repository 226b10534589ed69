"""Marks that say which turns, and which parts of a turn, bear no loss, in the words of the field's formats.

Of a turn: ``weight`` (OpenAI), ``train``, ``training`` and ``train_detail`` (axolotl), ``masked`` (torchtune). Of a
part of a content that is a list: ``train`` and ``weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from ftcli.plain import JsonObject
from ftcli.rows.row import Misfit, Ranges

_TRAIN = ("train", "training")


def marks_of(turns: Sequence[Any], roles: Sequence[str], first: int = 0) -> dict[int, Ranges | None]:
    """For each assistant's turn that is marked: the character ranges of its text without loss, None for all of it.

    Args:
        turns: The turns as the row holds them, with their ``roles`` as they are understood.
        first: The number of the first turn, counted from 0.

    Raises:
        Misfit: a mark that nothing can be made of: a weight between 0 and 1, or a turn of somebody else to be trained.
    """
    found: dict[int, Ranges | None] = {}
    for place, (turn, role) in enumerate(zip(turns, roles, strict=True)):
        number = first + place + 1
        name = f"message {number}"
        whole, parts = _wanted(turn, name), _parts(turn, name)
        if role != "assistant":
            # A weight of 1 is what OpenAI's format means without one, whoever speaks; it says nothing here.
            if (whole and turn.get("weight") is None) or any(train for _, train in parts):
                raise Misfit(f"{name} is marked to be trained, and only the assistant's turns are")
            continue
        ranges = tuple(place for place, train in parts if not train)
        if whole is False or (ranges and _covered(ranges, len(_text(turn)))):
            found[number - 1] = None
        elif ranges:
            found[number - 1] = ranges
    return found


def _text(turn: JsonObject) -> str:
    """The text of a turn, whose content may be a list of parts."""
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _wanted(item: JsonObject, name: str) -> bool | None:
    """True if a turn or a part is to be trained; None if it does not say."""
    said = {key: _flag(item[key], key, name) for key in (*_TRAIN, "weight") if item.get(key) is not None}
    if item.get("masked") is not None:
        said["masked"] = not _flag(item["masked"], "masked", name)
    if len(set(said.values())) > 1:
        raise Misfit(f"{name} says in {', '.join(map(repr, said))} that it is to be trained and that it is not")
    return next(iter(said.values()), None)


def _flag(value: Any, key: str, name: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise Misfit(f"{name} has {key!r} {value!r}: a turn is trained (1, true) or not (0, false), and nothing between")


def _parts(turn: JsonObject, name: str) -> list[tuple[tuple[int, int], bool]]:
    """The marked parts of a turn's text, from a content that is a list and from ``train_detail``."""
    found: list[tuple[tuple[int, int], bool]] = []
    content, end = turn.get("content"), 0
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict):
            start, end = end, end + len(str(part.get("text", "")))
            wanted = _wanted(part, f"a part of {name}")
            found += [((start, end), wanted)] if wanted is not None else []
    details = turn.get("train_detail") or []
    if not isinstance(details, list):
        raise Misfit(f"{name}: 'train_detail' must be a list")
    for detail in details:
        try:
            place = (index(detail["begin_offset"]), index(detail["end_offset"]) + 1)  # axolotl counts the last one in
            found.append((place, _flag(detail["train"], "train", name)))
        except (KeyError, TypeError, ValueError) as error:
            raise Misfit(f"{name}: each 'train_detail' needs begin_offset, end_offset and train") from error
    return found


def _covered(ranges: Ranges, length: int) -> bool:
    """True if ``ranges`` leave nothing of a text of ``length`` characters."""
    reached = 0
    for start, end in sorted(ranges):
        if start > reached:
            return False
        reached = max(reached, end)
    return reached >= length
