"""The origin of every value of a loaded recipe."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.config.tree import ListNode, MapNode, Tree
from ftcli.errors import Origin

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
