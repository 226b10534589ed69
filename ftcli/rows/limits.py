"""Reads what strangers wrote without harm: JSON of bounded depth with nothing of it lost, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ftcli.plain import JsonObject

#: Levels of lists and objects in a row. Conversations with calls and schemas of tools have about twenty; Python gives
#: up at some hundreds, in whichever step comes to them first.
MAX_LEVELS = 100


class TooDeep(ValueError):
    """A value of more levels than :data:`MAX_LEVELS`."""

    def __init__(self) -> None:
        super().__init__(f"lists and objects nested more than {MAX_LEVELS} levels deep")


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises ValueError for what is no JSON, and for a key that an object has twice (of which Python's ``json`` would
    keep the last); :class:`TooDeep`, which is one, for values nested too deeply.
    """
    value = parse_list(text)
    if text.count("[") + text.count("{") > MAX_LEVELS and not is_shallow(value):  # most texts need no closer look
        raise TooDeep
    return value


def parse_list(text: str) -> Any:
    """Parses a list like :func:`parse`, but with Python's own limit alone: its items are looked at one by one."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise TooDeep from error


def is_shallow(value: Any) -> bool:
    """True if a value has at most :data:`MAX_LEVELS` levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_LEVELS):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
        if not level:
            return True
    return False


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _unique(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {twice[:80]!r} appears twice, and only one of its values could be used")
    return made


@contextlib.contextmanager
def limited_memory(spare: int) -> Iterator[None]:
    """A block that may take ``spare`` bytes of address space beyond what this process has: then it gets MemoryError.

    Only where the system says how much a process has (Linux), and in the main thread: of two threads that take turns to
    set and restore the process' limit, one would leave it set. A narrower limit that is there already stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + spare
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
