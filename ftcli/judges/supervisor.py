"""Runs the Python program that it reads from stdin, and leaves none of its processes behind. A separate script, run as
``python -I supervisor.py SECONDS MEMORY_BYTES``. It exits with the program's status; with 0 where that was killed.

Where the system allows it, the program gets namespaces of its own: it sees no other process and no network, and all
that it started ends with it. Elsewhere its orphans are handed to this process, which ends them. Neither is a boundary
against a program that means harm: files of the user can be read.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_SET_CHILD_SUBREAPER, _SET_DEATH_SIGNAL = 36, 1
_FILE_BYTES, _OPEN_FILES = 16 * 2**20, 64


def main(seconds: float, memory_bytes: int) -> int:
    """The program's exit status; 0 where it was killed or took too long."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    libc.unshare(_NEWUSER | _NEWPID | _NEWNET)  # refused in many containers

    def limit() -> None:
        libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        whole = int(seconds) + 1
        for name, most in (
            (resource.RLIMIT_CPU, whole),
            (resource.RLIMIT_AS, memory_bytes),
            (resource.RLIMIT_FSIZE, _FILE_BYTES),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(name, (most, most))

    program = subprocess.Popen(
        [sys.executable, "-I", "-"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limit,  # this process has one thread
    )
    status = 0
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = max(program.wait(seconds), 0)
    _end_all()
    return status


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


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])))
