"""The place of a process among those of one run, as its launcher said, and the signals that reach a started process."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


@dataclass(frozen=True, slots=True)
class Place:
    """One process among ``size`` that train together. Rank 0 leads: it alone writes, prints and locks.

    Attributes:
        rank, size: Number of this process, and how many there are, over all hosts.
        local_rank, local_size: The same among those of this host.
        address, port: Where the processes find each other. Without a port rank 0 takes a free one, and says so in
            ``folder``.
        folder: Where ftcli's own launcher leaves word of a process that was killed; None under another launcher.
        hosted: Whether the launcher itself answers at ``address``; else rank 0 does.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    folder: Path | None = None
    hosted: bool = False

    @property
    def leads(self) -> bool:
        """True if this process writes and prints."""
        return self.rank == 0

    @property
    def local_leader(self) -> int:
        """The rank that prepares data and weights on this host."""
        return self.rank - self.local_rank


#: In :attr:`Place.folder`: the port that rank 0 listens at, and one file for each process that was killed.
PORT_NAME = "port"
#: In :attr:`Place.folder`: rank 0 has left; nobody is to look for it any more.
ENDED_NAME = "ended"
#: In :attr:`Place.folder`: the signal that the launcher got, and passed on as SIGHUP.
SIGNAL_NAME = "signal"


#: prctl's number for the signal that a process gets when its parent ends (linux/prctl.h).
_SET_DEATH_SIGNAL = 1


def lost_name(rank: int) -> str:
    """Name of the file that says how a rank was lost: "was killed by SIGKILL"."""
    return f"lost-{rank}"


def sign_name(rank: int) -> str:
    """Name of the file that a rank touches for as long as it lives."""
    return f"sign-{rank}"


def hearing_its_end(number: int) -> Callable[[], None]:
    """A function that gives the process that calls it a signal when its parent ends, killed or not, where there is such
    a thing (Linux).
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before there is a fork

    def hear() -> None:
        if libc is not None:
            libc.prctl(_SET_DEATH_SIGNAL, int(number))

    return hear


def start_deaf(process: BaseProcess, numbers: Collection[signal.Signals]) -> None:
    """Starts a process which these signals do not reach until it calls :func:`ignore`.

    A terminal sends Ctrl-C to all processes of a group, and an interpreter that is just starting would print a
    traceback.
    """
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing import resource_tracker

    def start() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # of this thread, and of what it starts
        process.start()

    resource_tracker.ensure_running()  # where it is started by the process' start, it unblocks these signals
    # In a thread, where Ctrl-C raises nothing: a process whose parent goes away halfway prints a traceback as well.
    with ThreadPoolExecutor(1) as starter:
        starter.submit(start).result()


def ignore(numbers: Collection[signal.Signals]) -> None:
    """Ignores signals in a process that was started deaf to them: the parent decides when it ends."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
