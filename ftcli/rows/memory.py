"""Limits this process's memory while it reads untrusted files: reading may fail, but cannot take all memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path


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
