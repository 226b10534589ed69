"""Reads what strangers wrote without harm: JSON of bounded depth with nothing of it lost, and chat templates, which
may fail but not take all of the machine's time or memory.

A template is a program that comes with a model or from the Hub. Jinja's sandbox keeps it from files and from Python's
internals, but stops neither nested loops nor text that doubles, whichever operator or filter does it. So the process
itself is limited while a template runs.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from ftcli.plain import JsonObject
from ftcli.units import size

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


#: Seconds of this process' CPU time, in all, beyond what conversations need; bytes beyond what it has, for each.
MAX_SECONDS = 3.0
MAX_BYTES = 512 * 2**20
#: What a conversation needs, generously: templates write a thousand characters in less than a millisecond.
_SECONDS_EACH = 0.02
_SECONDS_A_CHARACTER = 5e-6
#: The signal comes again as often, for code that takes the first one for an error of its own.
_AGAIN_SECONDS = 0.2

#: What a template raises for a conversation that it cannot render: it adds, divides, slices, compares and looks up what
#: rows hold, and may call itself. SyntaxError and RecursionError also come from its compilation.
REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    RuntimeError,
    SyntaxError,
)


class TemplateStopped(TemplateError):
    """A template took more time or memory than it may."""


Written = TypeVar("Written")


class Allowance:
    """The time that one template may waste, over all conversations. Once it is stopped, it is not run again."""

    def __init__(self) -> None:
        self._left = MAX_SECONDS
        self._stopped: str | None = None

    def run(self, characters: int, write: Callable[[], Written], conversations: int = 1) -> Written:
        """Calls ``write``, which renders conversations of so many characters together, within the time that is left.

        A template that several conversations stopped may be run again: which of them it was is not known.

        Raises Stopped, and whatever ``write`` raises.
        """
        if self._stopped is not None:
            raise TemplateStopped(self._stopped)
        needed = _SECONDS_EACH * conversations + _SECONDS_A_CHARACTER * characters
        begun = time.process_time()
        try:
            with limited_template(self._left + needed):
                return write()
        except TemplateStopped as error:
            self._stopped = str(error) if conversations == 1 else None
            raise
        finally:
            self._left -= max(0.0, time.process_time() - begun - needed)


@contextlib.contextmanager
def limited_template(seconds: float = MAX_SECONDS, spare: int = MAX_BYTES) -> Iterator[None]:
    """A block that may take ``seconds`` of CPU time and ``spare`` bytes of memory beyond what is taken.

    Both in the main thread only: there Python handles signals, and of two threads that take turns to set and restore
    the process' limit one would leave it set. Memory only where the system says how much a process has (Linux).

    Raises Stopped: the block took more. What it did is undone no further than any exception undoes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        with _timed(seconds), limited_memory(spare):
            yield
    except MemoryError as error:
        raise TemplateStopped(f"it needs more than {size(spare)} of memory for one conversation") from error


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "SIGPROF"):
        yield
        return
    running = True

    def stop(_number: int, _frame: FrameType | None) -> None:
        if running:
            raise TemplateStopped("it is far too slow for conversations of this size")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, max(seconds, _SECONDS_EACH), _AGAIN_SECONDS)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
