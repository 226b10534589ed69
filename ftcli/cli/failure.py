"""Turns every exception that ends a command into findings and an exit status."""

from __future__ import annotations

import errno
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.cli.render import terminal_text
from ftcli.errors import ExitCode, Finding, FtcliError, Unwinding, first_line
from ftcli.ranks import Place
from ftcli.run.heartbeat import RankLost
from ftcli.run.out_of_memory import is_out_of_memory


@dataclass(frozen=True, slots=True)
class Failure:
    """The text to show, and the status to exit with."""

    findings: tuple[Finding, ...]
    exit_code: int


def failure_of(error: BaseException, *, command: Sequence[str], debug: bool) -> Failure:
    """An FtcliError stays as it is; Ctrl-C, lack of memory and a full disk have their own codes; all else is a bug.

    The traceback of a bug is printed with `debug`, and written to a file otherwise.
    """
    if isinstance(error, FtcliError):
        return Failure(error.findings, int(error.exit_code))
    if _is_interruption(error):
        return Failure((Finding("FT191", "interrupted", severity="note"),), int(ExitCode.INTERRUPTED))
    if is_out_of_memory(error):
        help = (
            "lower train.per_device_train_batch_size or data.max_seq_len, or set train.gradient_checkpointing: true; "
            "`ftcli check` estimates what fits, and `ulimit -v` shows whether the shell allows less"
        )
        found = Finding("FT192", f"out of memory: {first_line(error)[:300]}", help=help)
        return Failure((found,), int(ExitCode.OUT_OF_MEMORY))
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        found = Finding(
            "FT193", f"no space left on the disk{where}", help="free some space; `ftcli train` continues the run"
        )
        return Failure((found,), int(ExitCode.PREFLIGHT))
    return Failure((_bug(error, command, debug),), int(ExitCode.BUG))


def is_told_by(place: Place | None, error: BaseException) -> bool:
    """True if this process reports an error of several ranks: rank 0 does, and where torchrun has lost it, the next
    one. Ftcli's own launcher reports a lost rank itself.
    """
    if place is None or place.leads:
        return True
    if place.folder is not None or not isinstance(error, RankLost) or 0 not in error.ranks:
        return False
    return place.rank == min(set(range(place.size)) - set(error.ranks))


def _is_interruption(error: BaseException) -> bool:
    """True for Ctrl-C, and for the RuntimeError that transformers raises when Ctrl-C interrupts its import."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt | Unwinding):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def _bug(error: BaseException, command: Sequence[str], debug: bool) -> Finding:
    text = "".join(traceback.format_exception(error))
    message = f"this is a bug in ftcli: {type(error).__name__}: {first_line(error)[:300]}"
    if debug:
        print(terminal_text(text), file=sys.stderr)  # noqa: T201
        return Finding("FT190", message, help="please report it with the traceback above")
    path = _crash_file(text, command)
    kept = f"the traceback is in {path}; please report it" if path is not None else "run it again with --debug"
    return Finding("FT190", message, help=kept)


def _crash_file(text: str, command: Sequence[str]) -> Path | None:
    from ftcli import __version__

    head = f"ftcli {__version__}, Python {platform.python_version()}, {platform.platform()}\n{' '.join(command)}\n\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ftcli-crash-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as stream:
            stream.write(head + text)
            return Path(stream.name)
    except OSError:
        return None
