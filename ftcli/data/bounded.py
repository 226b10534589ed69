"""Runs a chat template so that it may fail, but cannot take all of the machine's time or memory.

A template is a program that comes with a model or from the Hub. Jinja's sandbox keeps it from files and from Python's
internals, but stops neither nested loops nor text that doubles, whichever operator or filter does it. So the process
itself is limited while a template runs.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from jinja2.exceptions import TemplateError

from ftcli.rows.limits import limited_memory
from ftcli.units import size

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


class Allowance:
    """The time that one template may waste, over all conversations. Once it is stopped, it is not run again."""

    def __init__(self) -> None:
        self._left = MAX_SECONDS
        self._stopped: str | None = None

    def run(self, characters: int, write: Callable[[], str]) -> str:
        """The text that ``write`` renders of a conversation of so many characters, within the time that is left.

        Raises Stopped, and whatever ``write`` raises.
        """
        if self._stopped is not None:
            raise TemplateStopped(self._stopped)
        needed = _SECONDS_EACH + _SECONDS_A_CHARACTER * characters
        begun = time.process_time()
        try:
            with limited_template(self._left + needed):
                return write()
        except TemplateStopped as error:
            self._stopped = str(error)
            raise
        finally:
            self._left -= max(0.0, time.process_time() - begun - needed)


@contextlib.contextmanager
def limited_template(seconds: float = MAX_SECONDS, spare: int = MAX_BYTES) -> Iterator[None]:
    """A block that may take ``seconds`` of CPU time and ``spare`` bytes of memory beyond what is taken.

    Both in the main thread only: there Python handles signals, and of two threads that take turns to set and restore
    the process' limit one would leave it set. Memory only where the system says how much a process has (Linux).

    Raises:
        Stopped: the block took more. What it did is undone no further than any exception undoes it.
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
