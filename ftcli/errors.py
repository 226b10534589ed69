"""Typed errors: what went wrong, where it stands, what to do, and the exit status a script sees.

Everything that a user can cause is a :class:`Finding`; a stage collects all of its findings and raises
them together in one :class:`FtcliError`. Anything else that escapes is a bug in ftcli (exit 1).
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

Severity = Literal["error", "warning", "note"]


class ExitCode(IntEnum):
    """Exit statuses promised to shell scripts (see docs/errors.md)."""

    OK = 0
    BUG = 1
    RECIPE = 2
    PREFLIGHT = 3
    DATA = 4
    OUT_OF_MEMORY = 5
    DIVERGED = 6
    PREEMPTED = 75
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value.

    ``source`` is a file path, or the option that set it (``--set lora.r=0``). ``line`` and ``column`` count
    from 1 and are None where the source has no lines. ``excerpt`` is the source line, ``length`` the number of
    characters to underline.
    """

    source: str
    line: int | None = None
    column: int | None = None
    excerpt: str | None = None
    length: int = 1

    def __str__(self) -> str:
        parts = [self.source, *(str(n) for n in (self.line, self.column) if n is not None)]
        return ":".join(parts)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check has to say. ``code`` is ``FTnnn`` and has an entry in docs/errors.md."""

    code: str
    message: str
    origin: Origin | None = None
    help: str | None = None
    severity: Severity = "error"


#: Of a library's message. Some hold the whole value that they are about.
_LONGEST_LINE = 500


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, of a long one its begin; its type's name where it says nothing."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


class Unwinding(BaseException):
    """A signal asks for the end of what is being done. Nothing may catch it but who waits for it: not an Exception."""


#: The status that errors of a code's hundred exit with, where they do not say another one.
_USUAL = {
    **dict.fromkeys("127", ExitCode.RECIPE),
    **dict.fromkeys("356", ExitCode.PREFLIGHT),
    "4": ExitCode.DATA,
}


class FtcliError(Exception):
    """One stage's findings and the status to exit with."""

    def __init__(self, findings: Iterable[Finding], exit_code: ExitCode) -> None:
        self.findings = tuple(findings)
        self.exit_code = exit_code
        super().__init__("; ".join(f"{f.code}: {f.message}" for f in self.findings))

    @classmethod
    def single(
        cls,
        code: str,
        message: str,
        *,
        exit_code: ExitCode | None = None,
        origin: Origin | None = None,
        help: str | None = None,
    ) -> FtcliError:
        """An error of exactly one finding.

        ``exit_code`` is that of the code's hundred if None: 2 of FT1xx, FT2xx and FT7xx; 3 of FT3xx, FT5xx and FT6xx; 4
        of FT4xx.
        """
        return cls([Finding(code, message, origin, help)], _USUAL[code[2]] if exit_code is None else exit_code)


#: What CUDA, Triton, NCCL and cuBLAS say when memory is short for what they take beside torch's allocator.
_OF_LIBRARIES = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
#: What the loader of libraries and the system say where a process may have no more, as under `ulimit -v`.
_OF_THE_SYSTEM = ("failed to map segment", "annot allocate memory", "can't start new thread", "unable to mmap")


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
