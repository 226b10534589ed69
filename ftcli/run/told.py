"""How a rank tells the others why it has failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.plain import JsonObject
from ftcli.run.out_of_memory import is_out_of_memory

#: What torch says of connections that are closed, cut or silent, whichever library they are of.
_OF_CONNECTIONS = ("gloo", "NCCL", "nccl", "Connection closed", "communicator")


def reasons(error: BaseException) -> tuple[ExitCode, Sequence[Finding]]:
    """The exit code and the findings of a failure."""
    if isinstance(error, FtcliError):
        return error.exit_code, error.findings
    text = f"{type(error).__name__}: {first_line(error)[:300]}"
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY, (Finding("FT192", f"out of memory: {text}"),)
    help = "run it again with --debug: the rank prints its traceback"
    return ExitCode.BUG, (Finding("FT190", f"this is a bug in ftcli: {text}", help=help),)


def as_json(finding: Finding) -> JsonObject:
    """A finding for another process, which has no files to show lines of."""
    origin = "" if finding.origin is None else f"{finding.origin}: "
    return {**asdict(finding), "message": f"{origin}{finding.message}", "origin": None}


def is_of_connections(error: RuntimeError) -> bool:
    """Whether an error says that another rank cannot be reached any more."""
    return not is_out_of_memory(error) and any(word in str(error) for word in _OF_CONNECTIONS)
