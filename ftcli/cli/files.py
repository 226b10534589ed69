"""Files that a command writes where its user says."""

from __future__ import annotations

import sys
from pathlib import Path

from ftcli.cli.environment import is_terminal
from ftcli.cli.render import terminal_text
from ftcli.errors import FtcliError, Origin, first_line
from ftcli.paths import RUN_RECIPE, is_file

_COMMAND_LINE = Origin("command line")
#: How a page of ours begins.
_PAGE = b"<!doctype html>"


def file_content(text: str) -> str:
    """The text to write to stdout for a file that somebody may keep: to the letter, except on a terminal."""
    return (terminal_text(text) if is_terminal(sys.stdout) else text).rstrip("\n")


def write_new(text: str, target: Path, *, force: bool) -> None:
    """Writes a file that is not there yet, unless forced: whole, or not at all.

    Raises FtcliError FT153 or FT155 (exit RECIPE).
    """
    from ftcli.run.atomic import write_named

    _require_nobodys(target)
    try:
        write_named(target, text.encode("utf-8"), overwrite=force)
    except FileExistsError:
        raise _exists(target, "name another file, or use --force to overwrite it") from None
    except OSError as error:
        raise _unwritable(target, error) from None


def write_page(text: str, target: Path) -> None:
    """Writes a page, over an earlier one where there is one. Raises FtcliError FT153 or FT155 (exit RECIPE)."""
    from ftcli.run.atomic import write_named

    require_page(target)
    try:
        write_named(target, text.encode("utf-8"))
    except OSError as error:
        raise _unwritable(target, error) from None


def require_page(target: Path) -> None:
    """Refuses to replace a file that is no page, or that belongs to a run. Raises FtcliError FT153 (exit RECIPE)."""
    _require_nobodys(target)
    if is_file(target):
        try:
            with target.open("rb") as file:
                begin = file.read(len(_PAGE))
        except OSError as error:
            raise _unwritable(target, error) from None
        if begin and begin.lower() != _PAGE:
            raise _exists(target, "name another file; only an earlier page is replaced", " and is no page of ftcli's")


def _require_nobodys(target: Path) -> None:
    """Raises FT153 where the name is that of a file of a run."""
    try:
        resolved = target.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links that lead in circles, a NUL in the name
        raise _unwritable(target, error) from None
    if not any(is_file(parent / RUN_RECIPE) for parent in resolved.parents):
        return
    from ftcli.run.directory import run_that_owns

    run = run_that_owns(resolved)
    if run is not None:
        raise _exists(
            target, "name a file outside of the run directory", f": it is the name of a file of the run {run}"
        )


def _exists(target: Path, help: str, what: str = "") -> FtcliError:
    message = f"{target}{what}" if what.startswith(":") else f"{target} exists{what}"
    return FtcliError.single("FT153", message, origin=_COMMAND_LINE, help=help)


def _unwritable(target: Path, error: OSError | RuntimeError | ValueError) -> FtcliError:
    reason = getattr(error, "strerror", None) or first_line(error)
    help = "name a file in a folder that exists and that you can write to"
    return FtcliError.single("FT155", f"{target} cannot be written: {reason}", origin=_COMMAND_LINE, help=help)
