"""A recipe's YAML as a tree: values, each with the place where it stands. Immutable; merging makes new trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from ftcli.errors import Origin

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """One scalar. ``text`` is how it was written; ``quoted`` values are always text."""

    origin: Origin
    value: Scalar
    text: str
    quoted: bool = False

    @property
    def blank(self) -> bool:
        """True if nothing at all was written (``lora:``), unlike an explicit ``null``."""
        return self.value is None and self.text == ""


@dataclass(frozen=True, slots=True)
class ListNode:
    """A YAML list."""

    origin: Origin
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class MapEntry:
    """A key's value, and where the key stands."""

    key: Origin
    value: Tree


@dataclass(frozen=True, slots=True)
class MapNode:
    """A YAML mapping with text keys, in the order in which they were written."""

    origin: Origin
    entries: Mapping[str, MapEntry]


Tree = Leaf | ListNode | MapNode


def plain_tree(tree: Tree) -> Any:
    """The values alone: dicts, lists and scalars."""
    if isinstance(tree, MapNode):
        return {key: plain_tree(entry.value) for key, entry in tree.entries.items()}
    if isinstance(tree, ListNode):
        return [plain_tree(item) for item in tree.items]
    return tree.value


def merge(base: Tree, over: Tree) -> Tree:
    """`over` on top of `base`: maps merge key by key, everything else (lists too) is replaced."""
    if not (isinstance(base, MapNode) and isinstance(over, MapNode)):
        return over
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        below = entries.get(key)
        entries[key] = entry if below is None else replace(entry, value=merge(below.value, entry.value))
    return MapNode(over.origin, entries)


def describe_kind(tree: Tree) -> str:
    """A message's name for this value: ``text `abc` ``, ``3``, ``a list``."""
    if isinstance(tree, MapNode):
        return "a section"
    if isinstance(tree, ListNode):
        return "a list"
    if tree.value is None:
        return "nothing" if tree.blank else "null"
    if isinstance(tree.value, bool):
        return str(tree.value).lower()
    if isinstance(tree.value, int | float):
        return _clip(tree.text)
    return f"text `{_clip(str(tree.value))}`"


def _clip(text: str, limit: int = 60) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= limit else text[: limit - 3] + "..."


Path = tuple[str, ...]


class Origins:
    """Finds the place of a value by its path: ``data.train.0.path``, or the parts of that as a sequence."""

    def __init__(self, tree: Tree) -> None:
        self._values: dict[Path, Origin] = {}
        self._keys: dict[Path, Origin] = {}
        self._collect(tree, ())

    def at(self, path: str | Sequence[str | int]) -> Origin | None:
        """The value's place, or that of its nearest written ancestor, in the end the file itself."""
        return self._nearest(self._values, _parts(path))

    def key(self, path: str | Sequence[str | int]) -> Origin | None:
        """The key's place (list items: the item's), or the nearest ancestor's."""
        return self._nearest(self._keys, _parts(path))

    def explicit(self, path: str | Sequence[str | int]) -> bool:
        """True if the recipe or an override sets this value; False for a default."""
        return _parts(path) in self._values

    def standing_in(self, path: str, other: str) -> Origins:
        """The same, but that all below ``path`` is found where ``other`` stands."""
        made, below, there = copy(self), _parts(path), _parts(other)

        def moved(table: dict[Path, Origin]) -> dict[Path, Origin]:
            place = self._nearest(table, there)
            kept = {key: origin for key, origin in table.items() if key[: len(below)] != below}
            return kept if place is None else {**kept, below: place}

        made._values, made._keys = moved(self._values), moved(self._keys)
        return made

    def _collect(self, tree: Tree, path: Path) -> None:
        self._values[path] = tree.origin
        self._keys.setdefault(path, tree.origin)
        if isinstance(tree, MapNode):
            for name, entry in tree.entries.items():
                self._keys[(*path, name)] = entry.key
                self._collect(entry.value, (*path, name))
        elif isinstance(tree, ListNode):
            for index, item in enumerate(tree.items):
                self._collect(item, (*path, str(index)))

    @staticmethod
    def _nearest(table: dict[Path, Origin], path: Path) -> Origin | None:
        for length in range(len(path), -1, -1):
            found = table.get(path[:length])
            if found is not None:
                return found
        return None


def _parts(path: str | Sequence[str | int]) -> Path:
    if isinstance(path, str):
        return tuple(path.split(".")) if path else ()
    return tuple(str(part) for part in path)
