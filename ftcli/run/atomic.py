"""Writes files so that they are complete or absent, and reads those of a run, which anybody may have changed.

A file is written beside its destination under a hidden name, flushed to the disk and renamed; the folder's
entry is then flushed as well. Readers see the old content or the new one, never a mixture. Nothing is ever renamed over
a device, a pipe, a socket or a folder. A link in a run directory is replaced by the file; a file that a user names
(:func:`write_named`) is written where its link leads.

Only regular files are read, up to a size that no run comes near: a pipe would be waited for, a device never ends.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonObject, plain

#: Beginning of the names of files and folders that are not complete yet.
TEMPORARY_PREFIX = ".tmp-"
#: Beginning of the names of results that are being written.
WRITING_PREFIX = ".writing-"
#: Beginning of the names of folders that are being deleted.
TRASH_PREFIX = ".trash-"

#: No file of a run but its metrics and its weights comes near this.
MOST_BYTES = 64 << 20

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: How Rust's standard library ends the text of a system's error.
_SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)")
_PROBE_BYTES = 1 << 20


def storage_error(error: OSError, path: Path) -> FtcliError:
    """The typed form of a failed write: FT724 when the disk is full, FT723 otherwise."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        message = f"no space left while writing {path}: {reason}"
        help = (
            "free disk space or lower checkpoint.keep_last; what was complete before is still there, "
            "and the run resumes from it"
        )
        return FtcliError.single("FT724", message, exit_code=ExitCode.PREFLIGHT, help=help)
    help = "check that the folder exists, is writable and is on a mounted disk; or choose another --output-dir"
    return FtcliError.single("FT723", f"cannot write {path}: {reason}", exit_code=ExitCode.PREFLIGHT, help=help)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn every OSError of the block into FT723 or FT724 naming ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def write_failure(error: Exception, folder: Path) -> OSError | None:
    """The failed write behind an exception that was raised while files were written into ``folder``; None: none failed.

    torch, safetensors and numpy report a full disk in errors of their own. safetensors' text has the number of the
    system's error; for the others one more write is tried, and the system's answer decides. ``folder`` is of no use
    afterwards.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error
    number = _SYSTEM_NUMBER.search(str(error))
    if number is not None:
        return OSError(int(number[1]), os.strerror(int(number[1])))
    try:
        files = [path for path in folder.rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size, default=folder / f"{TEMPORARY_PREFIX}probe")
        with largest.open("ab") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as refused:
        return refused
    return error if isinstance(error, OSError) else None


@contextlib.contextmanager
def writing_into(folder: Path, path: Path) -> Iterator[None]:
    """A block that fills ``folder``, which becomes ``path``: any failed write in it is raised as FT723 or FT724."""
    try:
        yield
    except FtcliError:
        raise
    except Exception as error:
        failure = write_failure(error, folder)
        if failure is None:
            raise
        raise storage_error(failure, path) from error


def fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Flush a folder's entries to the disk, where the file system can do that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems have no fsync for folders; the rename itself still happened.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS}:
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Flush every file and folder below ``root``, and ``root`` itself."""
    for folder, _, names in os.walk(root):
        for name in names:
            fsync_file(Path(folder, name))
        fsync_directory(Path(folder))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of ``path`` atomically. Raises OSError, with the content unchanged, where that fails or
    ``path`` is a device, a pipe, a socket or a folder.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode):
            _require_regular(mode)
    _replace(path, data)


def _replace(path: Path, data: bytes, mode: int | None = None) -> None:
    with _written_aside(path, data, mode) as aside:
        aside.replace(path)


@contextlib.contextmanager
def _written_aside(path: Path, data: bytes, mode: int | None = None) -> Iterator[Path]:
    """A block with a complete file beside ``path``, to which the block gives its name; nothing else is left of it."""
    aside = _aside(path)
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        yield aside
    finally:
        aside.unlink(missing_ok=True)
    fsync_directory(path.parent)


def _aside(path: Path) -> Path:
    """Path that the content of ``path`` is written to first. What a killed process of this number has left there is
    removed, and so is a link, which would lead elsewhere.
    """
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name[:100]}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    return aside


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically by UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace the content of ``path`` atomically by indented JSON. Raises ValueError for NaN or infinity."""
    write_bytes(path, json_bytes(value, indent=2))


def store_json(path: Path, value: Any) -> None:
    """Replaces a file of a run by ``value`` as :func:`ftcli.plain.plain` makes JSON of it: NaN and infinity are null.
    Raises FtcliError FT723 or FT724.
    """
    with storage_errors(path):
        write_json(path, plain(value))


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """``value`` as JSON in UTF-8, with a newline at the end. Half of a surrogate pair, which UTF-8 cannot hold, becomes
    JSON's own escape for it. Raises ValueError for NaN or infinity.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace")


def write_named(path: Path, data: bytes, *, overwrite: bool = True) -> None:
    """Write a file whose name a user gave: whole, or not at all. A link goes on pointing to its file, which is replaced
    and keeps its permissions; a device or a pipe, such as /dev/stdout, is written to.

    Raises FileExistsError where there is a file, and not ``overwrite``; OSError where it cannot be written, or nobody
    reads from a pipe.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        found = None
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if found is not None and (not stat.S_ISREG(found.st_mode) or _standard_output(found) is not None):
        _write_into(path, data, _standard_output(found))
    elif overwrite:
        _replace(path.resolve(), data, None if found is None else stat.S_IMODE(found.st_mode))
    elif os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    else:
        _create(path.resolve(), data)


def _standard_output(found: os.stat_result) -> int | None:
    """The stream of this process that is this very file, as after ``> page.html``: what it still writes would be lost
    with the file that is replaced."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(found.st_mode) and os.path.samestat(found, os.fstat(number)):
                return number
    return None


def _write_into(path: Path, data: bytes, number: int | None) -> None:
    if number is not None:
        (sys.stdout, sys.stderr)[number - 1].flush()
        descriptor = os.dup(number)
    else:  # without waiting for somebody who reads from a pipe
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb", closefd=True) as file:
        file.write(data)


def _create(path: Path, data: bytes) -> None:
    """Raises FileExistsError where somebody else has the name by now."""
    with _written_aside(path, data) as aside:
        try:
            path.hardlink_to(aside)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            aside.rename(path)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file, opened without waiting for anybody. Raises OSError for anything else."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o644)
    try:
        _require_regular(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def irregular_file(folder: Path) -> str:
    """Names a pipe, device or the like in a folder, as ``x.json: it is a pipe``; empty where nothing is.

    Libraries that load the folder would wait for a pipe, even past a signal, and read a device without end.
    """
    for path in sorted(folder.rglob("*")):
        try:
            mode = path.stat().st_mode
            if not stat.S_ISDIR(mode):
                _require_regular(mode)
        except FileNotFoundError:  # a link that leads nowhere is like a file that is missing
            continue
        except OSError as error:
            return f"{path.relative_to(folder)}: {error.strerror}"
    return ""


def _require_regular(mode: int) -> None:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a regular file")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file. Raises OSError: it cannot be read, is no regular file, or holds more than ``most``
    bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # As much as it held when it was opened: a buffer of the most that may be read may not be there to have.
        data = file.read(size) if size <= most else b""
    if size > most:
        raise OSError(errno.EFBIG, f"it holds {size:,} bytes, and {most:,} at most are read")
    return data


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file, as :func:`read_bytes`. Raises ValueError where it is no UTF-8."""
    return read_bytes(path, most).decode("utf-8")


def json_object_in(path: Path) -> JsonObject:
    """The map in a JSON file. Raises OSError where it cannot be read, ValueError where it is no JSON, or no map."""
    try:
        value = json.loads(read_bytes(path))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a map")
    return value


def read_json_object(path: Path) -> JsonObject:
    """The map in a JSON file; empty when the file is missing, damaged or holds something else."""
    try:
        return json_object_in(path)
    except (OSError, ValueError):
        return {}


def utc_now() -> str:
    """Now, as files and reports say it: ISO 8601 in UTC, to the second (``2026-11-21T03:30:00Z``)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rename_directory(source: Path, destination: Path) -> None:
    """Rename a folder within one file system and flush both parents. Raises OSError."""
    source.rename(destination)
    fsync_directory(destination.parent)
    if source.parent != destination.parent:
        fsync_directory(source.parent)


def first_free(pattern: str, parent: Path) -> Path:
    """The first of ``parent / pattern.format(n=1)``, 2, 3 … that does not exist."""
    return next(p for n in itertools.count(1) if not os.path.lexists(p := parent / pattern.format(n=n)))


def delete(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    fsync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Delete a folder: renamed aside first, so that a crash leaves no half-deleted folder under its name."""
    trash = first_free(f"{TRASH_PREFIX}{path.name}.{{n}}", path.parent)
    rename_directory(path, trash)
    shutil.rmtree(trash)


def replace_directory(staged: Path, destination: Path, marked: str = "") -> None:
    """Put the complete folder ``staged`` in the place of ``destination``, whose old content is deleted after.

    A crash between the two renames leaves the old content beside it as ``.trash-<marked><name>.N`` and the new one as
    ``staged``. Nothing half-written ever has the name ``destination``.
    """
    fsync_tree(staged)
    old = None
    if os.path.lexists(destination):
        old = first_free(f"{TRASH_PREFIX}{marked}{destination.name}.{{n}}", destination.parent)
        rename_directory(destination, old)
    rename_directory(staged, destination)
    if old is not None:
        delete(old)
