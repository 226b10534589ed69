"""Renders the part of Go's templates that ftcli writes: strings, contents, conditions and the loop over messages.

Written to check what was written, so it reads the text and knows nothing of how it was made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftcli.export.ollama.template import Turns

_ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)
_EQUAL = re.compile(r'eq (\$m\.Role|\$i) (?:"(\w+)"|(\d+))')
_LOOP = "range $i, $m := .Messages"


@dataclass(slots=True)
class _Block:
    """A condition's or the loop's branches: what each asks, and what stands in it."""

    branches: list[tuple[str, list[_Node]]] = field(default_factory=list)


_Node = str | _Block


def render(template: str, turns: Turns) -> str:
    """What Ollama makes of a conversation.

    Raises:
        ValueError: the template holds what is not known here.
    """
    tokens = iter(_tokens(template))
    nodes, end = _parse(tokens)
    if end is not None:
        raise ValueError(f"{end} without a beginning")
    system = "\n\n".join(content for role, content in turns if role == "system")
    return "".join(_written(nodes, turns, system, None))


def _tokens(template: str) -> Iterator[str]:
    place = 0
    for match in _ACTION.finditer(template):
        if match.start() != place:
            raise ValueError(f"text outside of actions: {template[place : match.start()]!r}")
        place = match.end()
        yield match[1]
    if place != len(template):
        raise ValueError(f"text outside of actions: {template[place:]!r}")


def _parse(tokens: Iterator[str]) -> tuple[list[_Node], str | None]:
    """Nodes up to the end of the block, and what ended it."""
    nodes: list[_Node] = []
    for action in tokens:
        if action == "end" or action.startswith("else"):
            return nodes, action
        if action.startswith("if ") or action == _LOOP:
            block, asked = _Block(), action.removeprefix("if ")
            while True:
                inner, end = _parse(tokens)
                block.branches.append((asked, inner))
                if end is None:
                    raise ValueError(f"{action} is not ended")
                if end == "end":
                    break
                asked = end.removeprefix("else").strip().removeprefix("if ")
            nodes.append(block)
        else:
            nodes.append(action)
    return nodes, None


def _written(nodes: list[_Node], turns: Turns, system: str, index: int | None) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, str):
            yield _value(node, turns, system, index)
        elif node.branches[0][0] == _LOOP:
            for each in range(len(turns)):
                yield from _written(node.branches[0][1], turns, system, each)
        else:
            chosen = next((inner for asked, inner in node.branches if _holds(asked, turns, system, index)), [])
            yield from _written(chosen, turns, system, index)


def _value(action: str, turns: Turns, system: str, index: int | None) -> str:
    if action == "$.System":
        return system
    if action == "$m.Content" and index is not None:
        return turns[index][1]
    if action.startswith('"'):
        return str(json.loads(action))
    raise ValueError(f"unknown: {action}")


def _holds(asked: str, turns: Turns, system: str, index: int | None) -> bool:
    if asked in ("", "$.System", "not $.System"):
        return {"": True, "$.System": bool(system), "not $.System": not system}[asked]
    match = _EQUAL.fullmatch(asked)
    if match is None or index is None:
        raise ValueError(f"unknown: {asked}")
    return turns[index][0] == match[2] if match[1] == "$m.Role" else index == int(match[3])
