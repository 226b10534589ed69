"""Files that are either complete or absent, also after a power cut.

A file is written beside its destination under a hidden name, flushed to the disk and renamed; the folder's
entry is then flushed as well. Readers see the old content or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonObject

#: Beginning of the names of files and folders that are not complete yet.
TEMPORARY_PREFIX = ".tmp-"
#: Beginning of the names of results that are being written.
WRITING_PREFIX = ".writing-"
#: Beginning of the names of folders that are being deleted.
TRASH_PREFIX = ".trash-"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: How Rust's standard library ends the text of a system's error.
_SYSTEM_NUMBER = re.compile(r"\(os error (\d+)\)")
_PROBE_BYTES = 1 << 20


def storage_error(error: OSError, path: Path) -> FtcliError:
    """The typed form of a failed write: FT724 when the disk is full, FT723 otherwise."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return FtcliError.single(
            "FT724",
            f"no space left while writing {path}: {reason}",
            exit_code=ExitCode.PREFLIGHT,
            help="free disk space or lower checkpoint.keep_last; what was complete before is still there, "
            "and the run resumes from it",
        )
    return FtcliError.single(
        "FT723",
        f"cannot write {path}: {reason}",
        exit_code=ExitCode.PREFLIGHT,
        help="check that the folder exists, is writable and is on a mounted disk; or choose another --output-dir",
    )


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn every OSError of the block into FT723 or FT724 naming ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path) from error


def write_failure(error: Exception, folder: Path) -> OSError | None:
    """The failed write behind an exception that was raised while files were written into ``folder``; None: none failed.

    torch, safetensors and numpy report a full disk in errors of their own. The text of safetensors has the number of
    the system's error. Those of the others do not, so one more write is tried, and the system's answer to it decides.
    ``folder`` is of no use afterwards.
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
    """Flush a file's content to the disk."""
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
    """Replace the content of ``path`` atomically.

    Raises:
        OSError: the content could not be written; ``path`` is then unchanged.
    """
    aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically by UTF-8 text."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replace the content of ``path`` atomically by indented JSON.

    Raises:
        ValueError: ``value`` holds NaN or infinity, which JSON does not have (see :func:`finite`).
    """
    write_bytes(path, json_bytes(value, indent=2))


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """``value`` as JSON in UTF-8, with a newline at the end.

    Half of a surrogate pair, which data can hold and UTF-8 cannot, becomes ``\\udc80``, say: JSON's own escape for it.

    Raises:
        ValueError: ``value`` holds NaN or infinity.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace")


def read_json_object(path: Path) -> JsonObject:
    """The map in a JSON file; empty when the file is missing, damaged or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def utc_now() -> str:
    """Now, as files and reports say it: ISO 8601 in UTC, to the second (``2026-11-21T03:30:00Z``)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rename_directory(source: Path, destination: Path) -> None:
    """Rename a folder within one file system and flush both parents.

    Raises:
        OSError: for instance when ``destination`` exists and is not empty.
    """
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


def replace_directory(staged: Path, destination: Path) -> None:
    """Put the complete folder ``staged`` in the place of ``destination``, whose old content is deleted after.

    A crash between the two renames leaves the old content beside it as ``.trash-<name>.N`` and the new one as
    ``staged``. Nothing half-written ever has the name ``destination``.
    """
    fsync_tree(staged)
    old = None
    if os.path.lexists(destination):
        old = first_free(f"{TRASH_PREFIX}{destination.name}.{{n}}", destination.parent)
        rename_directory(destination, old)
    rename_directory(staged, destination)
    if old is not None:
        shutil.rmtree(old)
