"""Runs a program or a user's function (worker.py), and leaves none of its processes behind. A separate script:
``python -I supervisor.py program SECONDS MEMORY_BYTES`` runs the Python program that it reads from stdin, and exits
with its status, with 0 where that was killed; ``python -I supervisor.py worker DESCRIPTOR PARENT NAME`` ends as the
worker ends, and passes on what it prints: of each call as much as a person may read.

What they have started is handed to this process when its own parent ends, whatever session or group it is in. All is
killed at the end: when the program is over, on SIGTERM, and when the process that wanted it is gone, killed or not.
A program also gets namespaces of its own where the system allows it: it sees no other process and no network. Neither
is a boundary against a program that means harm: files of the user can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_SET_CHILD_SUBREAPER, _SET_DEATH_SIGNAL = 36, 1
_FILE_BYTES, _OPEN_FILES = 16 * 2**20, 64
#: Of what a call prints; a function may print something for each completion of each step.
_LINES_SHOWN, _BYTES_SHOWN = 100, 16 * 2**10
#: As in worker.py, which this script cannot import.
_END_OF_CALL = b"\0ftcli-call\0"
#: What is printed is read when all that could print is dead.
_LAST_WORDS_SECONDS = 2.0
_AWAITED = frozenset({signal.SIGTERM, signal.SIGCHLD})


def program(seconds: float, memory_bytes: int) -> int:
    """The exit status of the program; 0 where it was killed or took too long."""
    libc = ctypes.CDLL(None, use_errno=True)
    _adopt_orphans()
    libc.unshare(_NEWUSER | _NEWPID | _NEWNET)  # refused in many containers

    def limit() -> None:
        whole = int(seconds) + 1
        for name, most in (
            (resource.RLIMIT_CPU, whole),
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (most, most))

    nothing = subprocess.DEVNULL
    return max(_run([sys.executable, "-I", "-"], limit, output=nothing, seconds=seconds) or 0, 0)


def worker(descriptor: int, parent: int, name: str) -> int:
    """The exit status of the worker, negative for the signal that killed it; 0 where it was to end."""
    _adopt_orphans()
    if os.getppid() != parent:  # it has ended before its end could be noticed
        return 0
    printed, theirs = os.pipe()
    relay = threading.Thread(target=_Relay(name, sys.stderr.fileno()).run, args=(printed,), daemon=True)

    def begun() -> None:
        os.close(theirs)
        relay.start()

    command = [sys.executable, "-P", str(Path(__file__).with_name("worker.py")), str(descriptor)]
    status = _run(command, lambda: None, output=theirs, inherited=descriptor, begun=begun)
    relay.join(_LAST_WORDS_SECONDS)
    return status or 0


class _Relay:
    """Passes on what calls of ``name`` print: the first lines of each, and how many there were beside them."""

    def __init__(self, name: str, target: int) -> None:
        self._name, self._target = name, target
        self._begin()

    def _begin(self) -> None:
        self._lines = self._bytes = self._left_out = 0
        self._is_cut = False  # the line that has not ended yet
        self._last = b"\n"

    def run(self, printed: int) -> None:
        """Until nobody can write there any more."""
        held = b""
        while part := os.read(printed, 1 << 16):
            *calls, rest = (held + part).split(_END_OF_CALL)
            for call in calls:
                self._pass_on(call)
                self._end_call()
            begun = [size for size in range(1, len(_END_OF_CALL)) if rest.endswith(_END_OF_CALL[:size])]
            whole = len(rest) - max(begun, default=0)
            self._pass_on(rest[:whole])
            held = rest[whole:]
        self._pass_on(held)
        self._end_call()

    def _pass_on(self, text: bytes) -> None:
        for part in text.splitlines(keepends=True):
            shown = part[: _BYTES_SHOWN - self._bytes] if self._lines < _LINES_SHOWN else b""
            self._write(shown)
            self._bytes += len(shown)
            self._is_cut = self._is_cut or len(shown) < len(part)
            if part.endswith((b"\n", b"\r")):
                self._lines += 1
                self._left_out += self._is_cut
                self._is_cut = False

    def _end_call(self) -> None:
        left_out = self._left_out + self._is_cut
        if left_out:
            begin = b"" if self._last.endswith(b"\n") else b"\n"
            lines = "1 more line" if left_out == 1 else f"{left_out:,} more lines"
            self._write(begin + f"... {lines} that {self._name} printed in this call\n".encode(errors="replace"))
        self._begin()

    def _write(self, text: bytes) -> None:
        self._last = text or self._last
        with contextlib.suppress(OSError):  # nobody reads it any more
            while text:
                text = text[os.write(self._target, text) :]


def _adopt_orphans() -> None:
    """This process gets the orphans of all that it starts, and SIGTERM, which waits to be heard, when its own parent
    ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGTERM)
        libc.prctl(_SET_CHILD_SUBREAPER, 1)


def _run(
    command: Sequence[str],
    limit: Callable[[], None],
    *,
    output: int | None = None,
    inherited: int | None = None,
    seconds: float = 1e9,
    begun: Callable[[], None] = lambda: None,
) -> int | None:
    """The exit status of a command; None where it was too late, or not wanted any more. Nothing of it is left.

    ``begun`` is called when it runs: what starts threads does so after the fork.
    """

    def prepare() -> None:  # this process has one thread
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        limit()

    handed = () if inherited is None else (inherited,)
    deadline = time.monotonic() + seconds
    running = subprocess.Popen(  # noqa: S603 - this interpreter
        command, stdout=output, stderr=output, pass_fds=handed, start_new_session=True, preexec_fn=prepare
    )
    for descriptor in handed:
        os.close(descriptor)  # whoever holds the other end is to see that the command is gone
    begun()
    ended: dict[int, int] = {}
    while running.pid not in ended and (left := deadline - time.monotonic()) > 0:
        if _heard(left) != signal.SIGCHLD:
            break
        ended |= _reaped()
    status = ended.get(running.pid)
    running.returncode = status or 0
    _end_all()
    return status


def _heard(seconds: float) -> int | None:
    """The signal that comes; None where none does within so many seconds."""
    if sys.platform != "linux":
        return signal.sigwait(_AWAITED)
    heard = signal.sigtimedwait(_AWAITED, seconds)
    return None if heard is None else heard.si_signo


def _reaped() -> dict[int, int]:
    """Exit statuses of the children that have ended by now."""
    found = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return found


def _end_all() -> None:
    """Kills this process' children, and theirs as they become its own, until none is left."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after_name = path.read_text().rpartition(")")[2].split()
            if int(after_name[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _end_as(status: int) -> None:
    """Ends this process as another one has ended."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        with contextlib.suppress(OSError):  # SIGKILL has no other action
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _end_as(worker(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    sys.exit(program(float(sys.argv[2]), int(sys.argv[3])))
