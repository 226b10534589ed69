"""The text of a recipe from values and comments, in the order of our sections and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftcli.config.conversion.draft import DraftValue
from ftcli.config.dump import flow_text
from ftcli.config.recipe import Recipe

_COMMENT_COLUMN = 46


def recipe_text(values: Mapping[str, DraftValue], tool: str, name: str, order: Sequence[str]) -> str:
    """The recipe, with a header that says where it came from and what to do next."""
    head = [
        f"# Converted from {tool}'s {' '.join(name.split())} by `ftcli recipes convert`,",
        "# which has said what has no counterpart here, and what means something else.",
        "#",
        "#   ftcli check THIS-FILE     # before anything is downloaded or built",
        "#   ftcli train THIS-FILE",
    ]
    if "data.train" not in values:
        head += ["#", "# Name your rows in data.train, and held-out ones in data.eval."]
    elif "data.eval" not in values:
        head += ["#", "# Name held-out rows in data.eval: without them nothing is measured."]
    return "\n".join([*head, "version: 1", *body(values, order)]) + "\n"


def body(values: Mapping[str, DraftValue], order: Sequence[str]) -> list[str]:
    """The sections, with their keys in the ``order`` of all keys."""
    ranked = sorted(values, key=lambda key: order.index(key) if key in order else len(order))
    lines: list[str] = []
    for section in Recipe.model_fields:
        keys = [key for key in ranked if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"{section}:"]
        for key in keys:
            lines += _entry(key.partition(".")[2], values[key])
    return lines


def _entry(name: str, drafted: DraftValue) -> list[str]:
    comment = "" if drafted.comment is None else " ".join(drafted.comment.split())
    if _is_long(drafted.value):
        first = _commented(f"  {name}:", comment)
        return [first, *(f"    - {flow_text(item)}" for item in drafted.value)]
    return [_commented(f"  {name}: {flow_text(drafted.value)}", comment)]


def _is_long(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(item, Mapping) for item in value)
    )


def _commented(line: str, comment: str) -> str:
    return f"{line.ljust(_COMMENT_COLUMN)}  # {comment}" if comment else line
