"""Temporary folders that go away: with their owner, and those of owners that were killed when the next one is made.

A folder is held by a lock of the kernel's (``flock``), which dies with the last process that has it open. Process ids
would not do: another container may share the folder, and has other ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOCK = ".held"
#: Between making a folder and locking it lie microseconds; a folder that is not locked after this is nobody's.
_YOUNG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scratch:
    """A folder. ``descriptor`` holds it: processes that inherit it hold the folder, too."""

    path: Path
    descriptor: int


@contextlib.contextmanager
def scratch(kind: str) -> Iterator[Scratch]:
    """A folder ``ftcli-<kind>-…`` among the system's temporary files for the block.

    Raises OSError where none can be made.
    """
    prefix = f"ftcli-{kind}-"
    _clear(Path(tempfile.gettempdir()), prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with contextlib.suppress(OSError):  # a file system without locks: nobody clears there either
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Scratch(path, descriptor)
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _clear(folder: Path, prefix: str) -> None:
    """Removes folders of this user that nobody holds. Those of ftcli 0.2 and before have no lock, and stay."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if entry.name.startswith(prefix) and _is_left(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        descriptor = os.open(Path(entry.path, _LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(descriptor).st_mtime < _YOUNG_SECONDS:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
