"""Stopping on SIGTERM (preemption), SIGINT (Ctrl-C) and SIGHUP (the terminal is gone) without losing work.

The first signal is a request. Training finishes its step and writes a checkpoint. A phase that has nothing to save
runs inside :meth:`StopRequest.interruptible` and is left at once. A second signal stops at once everywhere, a third
one kills. Processes forked from this one, such as data workers, take no part in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from ftcli.errors import ExitCode, Finding, FtcliError, Unwinding

#: Signals that wait while files are written that say how a run ended; more of them mean that somebody insists.
_MOST_HELD = 2

SignalName = Literal["SIGTERM", "SIGINT", "SIGHUP"]

_FIRST_SIGNAL = (
    "stopping; training first finishes its step and writes a checkpoint. A second signal (Ctrl-C again) stops at once, "
    "and the run then goes on from the last complete checkpoint"
)
_AGAIN = "start the same command again"


def exit_code_of(name: SignalName) -> ExitCode:
    """Exit status of a run stopped by that signal: 75 for SIGTERM and SIGHUP, 130 for SIGINT."""
    return ExitCode.INTERRUPTED if name == "SIGINT" else ExitCode.PREEMPTED


class StopRequested(FtcliError):
    """A signal asked for the end in a phase without a checkpoint of its own (FT728, exit 75 or 130)."""

    def __init__(self, signal_name: SignalName, phase: str | None = None, *, of_run: bool = True) -> None:
        """``of_run``: what was stopped is a run, which has checkpoints."""
        self.signal_name = signal_name
        where = f" while {phase}" if phase else ""
        help = f"{_AGAIN}: it goes on from the last checkpoint, if there is one" if of_run else _AGAIN
        super().__init__([Finding("FT728", f"stopped by {signal_name}{where}", help=help)], exit_code_of(signal_name))


class LeavePhase(Unwinding):
    """Unwinds an interruptible phase, whose end turns it into :class:`StopRequested`. Not an Exception: libraries catch
    those, and would carry on or report something else (transformers makes a RuntimeError of it).
    """


class StopNow(KeyboardInterrupt):
    """The second signal. Not an Exception, so that no library swallows it."""

    def __init__(self, signal_name: SignalName, *, of_run: bool = True) -> None:
        """``of_run``: as :class:`StopRequested` says."""
        self._of_run = of_run
        self.signal_name = signal_name
        self.exit_code = exit_code_of(signal_name)
        super().__init__(f"stopped at once by a second signal ({signal_name})")

    def as_error(self) -> FtcliError:
        """FT728 with exit 75 or 130, for whoever reports how the run ended."""
        help = f"{_AGAIN}: it goes on from the last complete checkpoint" if self._of_run else _AGAIN
        return FtcliError([Finding("FT728", str(self), help=help)], self.exit_code)


class StopRequest:
    """Context manager that turns the signals into a request and puts the previous handlers back at its end.

    Only for the main thread, where Python runs signal handlers. There is no global state: the object is passed on.
    """

    def __init__(
        self,
        *,
        sigterm: bool = True,
        say: Callable[[str], None] | None = None,
        passed_on: Path | None = None,
        of_run: bool = True,
    ) -> None:
        """``sigterm=False`` leaves SIGTERM and SIGHUP alone (`checkpoint.on_sigterm: false`). ``say`` is told at once,
        inside of the handler, what the first signal does where that takes a while; in the file ``passed_on`` a launcher
        says what it got when it passes a signal on as SIGHUP; ``of_run``: what is stopped has checkpoints.
        """
        self._passed_on = passed_on
        self._say = say
        self._of_run = of_run
        self.requested: SignalName | None = None
        self._names: tuple[SignalName, ...] = ("SIGTERM", "SIGINT", "SIGHUP") if sigterm else ("SIGINT",)
        self._previous: dict[SignalName, Any] = {}
        self._leave_at_once = False
        self._leaving = False
        self._over = False
        self._phase: str | None = None
        self._held = 0
        self._waiting: list[int] = []
        self._pid = os.getpid()

    def __enter__(self) -> StopRequest:
        """Install the handlers. Raises RuntimeError outside of the main thread, and where it is in use already."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("StopRequest works in the main thread only: Python runs signal handlers there")
        if self._previous:
            raise RuntimeError("this StopRequest is in use already")
        self._pid = os.getpid()
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup` says that the run goes on without a terminal
            self._names = tuple(name for name in self._names if name != "SIGHUP")
        for name in self._names:
            self._previous[name] = signal.signal(signal.Signals[name], self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, handler in self._previous.items():
            # None: the handler was not installed from Python and cannot be put back; the default is the closest.
            signal.signal(signal.Signals[name], signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        if kind is LeavePhase:  # the signal came between two instructions at the very end of a phase
            raise self.stopped() from None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return _in_worker(number)
        name = next(name for name in self._names if signal.Signals[name] == number)
        if self._held:
            if len(self._waiting) < _MOST_HELD:
                self._waiting.append(number)
                return None
            self.requested = self.requested or name
        if self.requested is not None:
            if name == "SIGHUP":  # shell and kernel both send one when a terminal goes, systemd one after SIGTERM
                return None
            for handled in self._names:
                signal.signal(signal.Signals[handled], signal.SIG_DFL)
            raise StopNow(name, of_run=self._of_run)
        self.requested = name = self._as_sent(name)
        if self._over:
            return None
        if self._leave_at_once:
            self._leaving = True
            raise LeavePhase
        if self._say is not None:
            self._say(f"{name}: {_FIRST_SIGNAL}")
        return None

    def _as_sent(self, name: SignalName) -> SignalName:
        """The signal that the launcher got, where it has passed this one on."""
        if name != "SIGHUP" or self._passed_on is None:
            return name
        with contextlib.suppress(OSError):
            said = self._passed_on.read_text(encoding="utf-8")
            return next((each for each in self._names if each == said), name)
        return name

    def stopped(self) -> StopRequested:
        """The error for the signal that came."""
        return self._stopped_in(self._phase)

    def _stopped_in(self, phase: str | None) -> StopRequested:
        return StopRequested(self.requested or "SIGTERM", phase, of_run=self._of_run)

    @property
    def exit_code(self) -> ExitCode | None:
        """The status to exit with when a stop was requested, else None."""
        return None if self.requested is None else exit_code_of(self.requested)

    def check(self, phase: str | None = None) -> None:
        """Leave a phase that has no checkpoint to write. Raises StopRequested: a signal has come."""
        if self.requested is not None:
            raise self._stopped_in(phase)

    def over(self) -> None:
        """Says that what could be stopped is complete: the first signal after that changes nothing."""
        self._over = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A few writes that no signal shall cut short: signals are answered at the end of the block, the third at once.
        Raises StopNow: the second came during the block.
        """
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            while self._waiting and not self._held:
                self._on_signal(self._waiting.pop(0), None)

    @contextlib.contextmanager
    def interruptible(self, phase: str | None = None) -> Iterator[None]:
        """A block that the first signal leaves at once: loading, tokenizing, evaluating. A library that swallows the
        exception, or makes another error of it, only delays it to the end of the block. Raises StopRequested: a signal
        came before or during the block.
        """
        before = (self._leave_at_once, self._phase)
        try:
            try:
                self._leave_at_once, self._phase = True, phase
                self.check(phase)
                yield
            finally:
                self._leave_at_once, self._phase = before
        except LeavePhase:
            raise self._stopped_in(phase) from None
        except StopRequested:
            raise
        except Exception as error:  # an FtcliError as well: what we made of the library's error
            if self._leaving:
                raise self._stopped_in(phase) from error
            raise
        self.check(phase)


@contextlib.contextmanager
def second_signal_as_error() -> Iterator[None]:
    """A block in which the second signal, which no library can catch, ends in FT728 (exit 75 or 130)."""
    try:
        yield
    except StopNow as error:
        raise error.as_error() from None


@contextlib.contextmanager
def stoppable(phase: str) -> Iterator[None]:
    """A whole command that has nothing to save: a signal ends it at once, by FT728 (exit 75 or 130).

    Outside of the main thread, where Python handles no signals, it is just the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with second_signal_as_error(), StopRequest(of_run=False) as stop, stop.interruptible(phase):
        yield


def _in_worker(number: int) -> None:
    """Handles a signal in a forked child, which inherits the handlers: SIGTERM, by which pools end their workers, ends
    it; SIGINT and SIGHUP, which a terminal sends to all, are ignored, since the parent decides.
    """
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
