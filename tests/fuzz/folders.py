"""Folders that hold something other than they should: damage to files, and JSON with another value somewhere in it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import values
from tests.fuzz.rows import damaged

_odd = values.json_values | st.sampled_from([values.deep(300), "x" * 10_000, "../../../etc/passwd", "a/b", [], {}])


def paths_of(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside a JSON value; of long lists, to the first few."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:5]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*prefix, key)
        yield from paths_of(inner, (*prefix, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at ``path``; without it, where that is ``...``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


@st.composite
def changed_json(draw: st.DrawFn, text: str, extra: tuple[str, ...] = ()) -> bytes:
    """A JSON document with one to three values changed, removed, or added at the top under a key of ``extra``."""
    value = json.loads(text)
    for _ in range(draw(st.integers(1, 3))):
        ways = list(paths_of(value))
        if extra and draw(st.integers(0, 2)) == 0:
            value = {**value, draw(st.sampled_from(extra)): draw(_odd)}
        elif ways:
            value = replaced(value, draw(st.sampled_from(ways)), draw(_odd | st.just(...)))
    return json.dumps(value).encode()


@st.composite
def damage(draw: st.DrawFn, folder: Path, names: list[str]) -> dict[str, bytes | None]:
    """New contents for one to three files of a folder; None removes the file."""
    found: dict[str, bytes | None] = {}
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        content = (folder / name).read_bytes()
        if draw(st.integers(0, 6)) == 0:
            found[name] = None
        elif name.endswith(".json") and content and draw(st.booleans()):
            found[name] = draw(changed_json(content.decode()))
        else:
            found[name] = draw(damaged(content))
    return found


#: What may stand in the place of a file and is none: made by a function of its path.
NO_FILES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a device that holds nothing": lambda path: path.symlink_to("/dev/null"),
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "holes of 5 GiB": lambda path: (path.touch(), os.truncate(path, 5 << 30)),
}


def stand_in(folder: Path, kinds: dict[str, str]) -> None:
    """Puts something of :data:`NO_FILES` in the place of files."""
    for name, kind in kinds.items():
        (folder / name).unlink()
        NO_FILES[kind](folder / name)


def apply(folder: Path, damage: dict[str, bytes | None]) -> None:
    """Writes and removes files."""
    for name, content in damage.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)


def files_of(folder: Path) -> list[str]:
    """All files below a folder, as paths from there."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def fingerprints(folder: Path, names: list[str]) -> dict[str, str]:
    """What is in files."""
    return {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()
    }
