"""What every command line is held to, whatever it is given: the property of all fuzzing.

A status of the table and no bug (FT190), no traceback, every error with a known code, a place and a remedy, one JSON
document on stdout, and for commands that only look: twenty seconds and 1 GiB.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import currently_in_test_context, note

from ftcli import __version__
from ftcli.cli.app import main
from ftcli.errors import ExitCode, FtcliError

#: Of CPU time, ten times what any takes: what does not end, or grows with the square of its input, takes more.
SECONDS = 20.0
GIB = 2**30
#: After so long a command is ended, so that a hang is an example like any other. Lower memory than the machine has.
_HANGS = 300.0
_MOST_MEMORY = 6 * GIB

_STATUSES = frozenset(ExitCode) - {ExitCode.BUG}


class Hangs(Exception):
    """A command that does not end."""


@dataclass(frozen=True)
class Outcome:
    """How one command line ended.

    ``seconds`` are of CPU time, which no other work on the machine changes, and 0 where Hypothesis traces each line to
    explain a failure; ``peak`` are the bytes that it held beyond what this process held before.
    """

    words: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    seconds: float
    peak: int

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of a command with ``--json``."""
        found: dict[str, Any] = json.loads(self.stdout)
        return found

    @property
    def codes(self) -> set[str]:
        """The codes of all findings."""
        return {finding["code"] for finding in self.document["findings"]}


def run(folder: Path, *words: str) -> Outcome:
    """Runs a command line in this process, in ``folder``, and notes how it ended for the report of a failure."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    _forget_peak()
    before, began = _resident(), time.process_time()
    with _inside(folder), _guarded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(words))
    seconds = time.process_time() - began if sys.gettrace() is None else 0.0
    outcome = Outcome(words, status, _text(out), _text(err), seconds, max(0, _peak() - before))
    if currently_in_test_context():
        note(f"ftcli {' '.join(words)!r}: status {status}, {seconds:.2f} s, {outcome.peak >> 20} MiB")
    return outcome


def hold(outcome: Outcome, *, looks_only: bool = True) -> None:
    """The contract. A command that ``looks_only`` has its twenty seconds and 1 GiB."""
    found = list(problems(outcome, looks_only=looks_only))
    assert not found, "\n".join([*found, outcome.stdout, outcome.stderr, _crash(outcome.stdout + outcome.stderr)])


def hold_refusal(error: FtcliError) -> None:
    """What is promised of an error that no command has told yet."""
    found = [] if error.exit_code in _STATUSES else [f"status {error.exit_code}"]
    for finding in error.findings:
        place = str(finding.origin) if finding.origin is not None else None
        found += _lacks(finding.code, finding.severity, finding.message, place, finding.help)
    assert not found, found


def problems(outcome: Outcome, *, looks_only: bool) -> Iterator[str]:
    """What is wrong with how a command ended, in words."""
    said = outcome.stdout + outcome.stderr
    if outcome.status not in _STATUSES:
        yield f"status {outcome.status}"
    if "Traceback (most recent" in outcome.stderr:
        yield "a traceback"
    if re.search(r'error\[FT190\]|"code": "FT190"', said):  # an input may hold the word
        yield "a bug"
    version = "--version" in outcome.words and said == f"ftcli {__version__}\n"  # before any command
    if "--json" in outcome.words and not version and not {"--help", "-h"} & set(outcome.words):
        yield from _of_document(outcome)
    if looks_only and outcome.seconds >= SECONDS:
        yield f"{outcome.seconds:.1f} s"
    if looks_only and outcome.peak >= GIB:
        yield f"{outcome.peak >> 20} MiB"


def _of_document(outcome: Outcome) -> Iterator[str]:
    try:
        document = outcome.document
    except ValueError as error:
        yield f"stdout is not one JSON document: {error}"
        return
    if document["exit_code"] != outcome.status or document["ok"] != (outcome.status == 0):
        yield "the document has another status"
    errors = [finding for finding in document["findings"] if finding["severity"] == "error"]
    if not errors and outcome.status not in (0, ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
        yield "it fails without an error"
    for finding in document["findings"]:
        yield from _lacks(finding["code"], finding["severity"], finding["message"], finding["source"], finding["help"])


def _lacks(code: str, severity: str, message: str, place: str | None, help: str | None) -> Iterator[str]:
    """What a finding does not say."""
    if code not in _known_codes():
        yield f"docs/errors.md has no {code}"
    if not message.strip():
        yield f"{code} says nothing"
    if severity == "error" and not (help or code in _remedies()):
        yield f"{code} without a remedy: {message}"
    if severity == "error" and not (place or _names_a_place(message)):
        yield f"{code} without a place: {message}"


def _names_a_place(message: str) -> bool:
    """Whether a message without a place of its own names a file, a key, an option or a tensor."""
    return (
        re.search(r"^\S+ (is|has|holds|lacks|cannot) |step \d|\S/\S|\w+\.\w+|`[^`]+`|--\w|[A-Z_]{4,}", message)
        is not None
    )


@cache
def _page() -> str:
    return (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")


@cache
def _known_codes() -> frozenset[str]:
    return frozenset(re.findall(r"^## (FT\d{3}) ", _page(), re.MULTILINE))


@cache
def _remedies() -> frozenset[str]:
    """Codes whose entry in docs/errors.md says what to do."""
    sections = re.split(r"^## ", _page(), flags=re.MULTILINE)
    return frozenset(text[:5] for text in sections if "**Remedy:**" in text)


def _crash(said: str) -> str:
    """The traceback of a bug, which is in the file that the message names."""
    named = re.search(r"the traceback is in (\S+\.txt)", said)
    if named is None or not Path(named[1]).is_file():
        return ""
    text = Path(named[1]).read_text(encoding="utf-8")
    Path(named[1]).unlink()
    return f"\n{text[-6000:]}"


# -- this process ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Ends what hangs, with a traceback of where; keeps what takes all memory from taking the machine's."""

    def end(_number: int, frame: FrameType | None) -> None:
        raise Hangs("".join(traceback.format_stack(frame, 12)))

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _MOST_MEMORY, hard))
    handler = signal.signal(signal.SIGALRM, end)
    left, _ = signal.setitimer(signal.ITIMER_REAL, _HANGS)  # pytest-timeout has this timer otherwise
    began = time.monotonic()
    try:
        yield
    finally:
        rest = max(0.1, left - (time.monotonic() - began)) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, rest)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _text(stream: io.TextIOWrapper) -> str:
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode("utf-8")


def _pages(column: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


def _virtual() -> int:
    return _pages(0) if sys.platform == "linux" else 0


def _resident() -> int:
    return _pages(1) if sys.platform == "linux" else 0


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Most bytes held since :func:`_forget_peak`; 0 where the system does not say."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    return 0
