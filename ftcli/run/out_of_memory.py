"""Tells whether an exception means that memory ran out, and how much this process uses. Imports no torch."""

from __future__ import annotations

import errno
import re
import resource
from pathlib import Path

from ftcli.errors import first_line

#: ``Tried to allocate 20.00 GiB`` (CUDA) and ``you tried to allocate 8192 bytes`` (CPU).
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMGT]iB)")
#: What CUDA, Triton, NCCL and cuBLAS say when memory is short for what they take beside torch's allocator.
_OF_LIBRARIES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: What the loader of libraries and the system say where a process may have no more, as under `ulimit -v`.
_OF_THE_SYSTEM = ("failed to map segment", "annot allocate memory", "can't start new thread", "unable to mmap")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch (by class name, so that torch need not be imported) or Python ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "torch"}
    if "OutOfMemoryError" in names:
        return True
    if isinstance(error, SystemError):  # a library in C found none, and raised nothing
        return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    text = str(error)
    if isinstance(error, RuntimeError) and any(word in text for word in (*_OF_LIBRARIES, "DefaultCPUAllocator")):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, ImportError | OSError | RuntimeError) and any(word in text for word in _OF_THE_SYSTEM)


def said_of(error: BaseException) -> str:
    """The line of the error's text that speaks of memory, where it has one; else its first line. NumPy's ImportError
    begins with advice.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if any(word in line for word in _OF_THE_SYSTEM)), first_line(error))


def asked_bytes(error: BaseException) -> int | None:
    """Bytes that were asked for when memory ran out, if the error says so."""
    match = _ASKED.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def resident_bytes() -> int | None:
    """Bytes of memory that this process uses now; None where /proc does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), None)
