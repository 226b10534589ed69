"""Files that a command writes where its user says."""

from __future__ import annotations

from pathlib import Path

from ftcli.errors import ExitCode, FtcliError, Origin

_COMMAND_LINE = Origin("command line")


def write_new(text: str, target: Path, *, force: bool) -> None:
    """Writes a file that is not there yet, unless forced. Raises FtcliError FT153 or FT155 (exit RECIPE)."""
    try:
        with target.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
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
            help="name a file in a folder that exists and that you may write to",
        ) from None
