"""Reads a recipe file: everything that can be wrong with a file before it is YAML has its own code here."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from ftcli.errors import FtcliError, Origin
from ftcli.paths import RECIPE_SUFFIXES, RUN_RECIPE

#: No recipe written by a person comes near this; larger files are refused before they are read.
MAX_BYTES = 128 * 1024

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_BINARY = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x80-\x84\x86-\x9f\ufffe\uffff]")
_FOREIGN_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"PK\x03\x04": "a zip archive", b"\x1f\x8b": "gzip"}


def read_text(path: Path, *, named_by: Origin | None = None, most: int = MAX_BYTES) -> str:
    """The text of a recipe file. ``named_by`` is where an ``extends`` names it, None for the file of the command line.

    A file of more than ``most`` bytes is no recipe.

    Raises FtcliError (exit RECIPE) for a file that is missing (FT101; FT122 when named by ``extends``), a directory
    (FT102), unreadable (FT103), too large (FT104), empty (FT105), not text (FT106), not UTF-8 (FT107) or no regular
    file (FT108).
    """
    origin = Origin(str(path))
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise _directory(path, origin)
        if not stat.S_ISREG(status.st_mode):
            raise _error("FT108", "is not a regular file", origin, "write the recipe to a file and name that")
        if status.st_size > most:
            raise _too_large(status.st_size, origin, most)
        with path.open("rb") as stream:
            raw = stream.read(most + 1)
    except FileNotFoundError:
        raise _missing(path, named_by) from None
    except IsADirectoryError:
        raise _directory(path, origin) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        help = "check its permissions (`ls -l`)" if isinstance(error, PermissionError) else "check the path (`ls -l`)"
        raise _error("FT103", f"cannot be read: {reason}", origin, help) from None
    if len(raw) > most:
        raise _too_large(len(raw), origin, most)
    text = _decode(raw, path, origin)
    if not text.strip():
        raise _error("FT105", "the file is empty", origin, "`ftcli recipes list` shows recipes to start from")
    return text


def lines_of(text: str) -> list[str]:
    """The lines of `text`, split where YAML ends lines."""
    return _LINE_BREAK.split(text)


def _decode(raw: bytes, path: Path, origin: Origin) -> str:
    for mark, name in _FOREIGN_MARKS.items():
        if raw.startswith(mark):
            code = "FT107" if name == "UTF-16" else "FT106"
            raise _error(code, f"is {name}, not UTF-8 text", origin, "save the recipe as UTF-8 text")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if b"\x00" in raw:
            raise _error("FT106", "is a binary file, not a recipe", origin, "name a YAML file") from None
        before = raw[: error.start].decode("utf-8-sig", errors="replace")
        place = _place(before, raw.decode("utf-8-sig", errors="replace"), path)
        message = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise _error("FT107", message, place, "save the recipe as UTF-8 text") from None
    found = _BINARY.search(text)
    if found is not None:
        if "\x00" in text:
            raise _error("FT106", "is a binary file, not a recipe", origin, "name a YAML file")
        place = _place(text[: found.start()], text, path)
        raise _error("FT106", f"control character U+{ord(found.group()):04X}", place, "remove it")
    return text


def _place(before: str, text: str, path: Path) -> Origin:
    lines = lines_of(before)
    return Origin(str(path), len(lines), len(lines[-1]) + 1, lines_of(text)[len(lines) - 1], 1)


def _missing(path: Path, named_by: Origin | None) -> FtcliError:
    if named_by is not None:
        help = "the path is relative to the file that names it"
        return _error("FT122", f"`extends` names {path}, which does not exist", named_by, help)
    near = _neighbours(path)
    help = f"did you mean {near}?" if near else "`ftcli recipes list` shows the recipes that ship with ftcli"
    return _error("FT101", "no such file", Origin(str(path)), help)


def _neighbours(path: Path) -> str | None:
    """A YAML file beside the missing one with a similar name."""
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in os.scandir(path.parent) if entry.name.endswith(RECIPE_SUFFIXES)]
    except OSError:
        return None
    stems = {name.rpartition(".")[0]: name for name in names}
    asked = path.name.rpartition(".")[0] if path.name.endswith(RECIPE_SUFFIXES) else path.name
    found = get_close_matches(asked, stems, n=1, cutoff=0.6)
    return str(path.with_name(stems[found[0]])) if found else None


def _directory(path: Path, origin: Origin) -> FtcliError:
    inside = path / RUN_RECIPE
    help = f"did you mean {inside}?" if inside.is_file() else "name a recipe file"
    return _error("FT102", "is a directory", origin, help)


def _too_large(size: int, origin: Origin, most: int) -> FtcliError:
    message = f"is too large for a recipe: {size:,} bytes, the limit is {most:,}"
    return _error("FT104", message, origin, "is this a data file? Data files are named in `data.train`")


def _error(code: str, message: str, origin: Origin, help: str) -> FtcliError:
    return FtcliError.single(code, message, origin=origin, help=help)
