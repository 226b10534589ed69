"""Files that a command writes where its user says."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ftcli.errors import ExitCode, FtcliError, Origin

_COMMAND_LINE = Origin("command line")


def write_new(text: str, target: Path, *, force: bool) -> None:
    """Writes a file that is not there yet, unless forced: whole, or not at all.

    Raises FtcliError FT153 or FT155 (exit RECIPE).
    """
    try:
        if target.exists() and not target.is_file():  # a pipe or a device, which cannot be replaced
            target.write_text(text, encoding="utf-8")
        else:
            _write_whole(text, target, force=force)
    except FileExistsError:
        raise FtcliError.single(
            "FT153",
            f"{target} exists",
            exit_code=ExitCode.RECIPE,
            origin=_COMMAND_LINE,
            help="name another file, or use --force to overwrite it",
        ) from None
    except OSError as error:
        raise FtcliError.single(
            "FT155",
            f"{target} cannot be written: {error.strerror}",
            exit_code=ExitCode.RECIPE,
            origin=_COMMAND_LINE,
            help="name a file in a folder that exists and that you can write to",
        ) from None


def _write_whole(text: str, target: Path, *, force: bool) -> None:
    """Writes beside the target, then takes its name; a link that is there goes on pointing to the file."""
    if not force and os.path.lexists(target):
        raise FileExistsError
    target = target.resolve()
    staged = target.with_name(f".{target.name[:100]}.{os.getpid()}.writing")
    try:
        with staged.open("x", encoding="utf-8") as stream:
            stream.write(text)
        if force:
            staged.replace(target)
        else:
            _take_name(staged, target)
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


def _take_name(staged: Path, target: Path) -> None:
    """Raises FileExistsError where somebody else has the name by now."""
    try:
        target.hardlink_to(staged)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError from None
        staged.rename(target)
