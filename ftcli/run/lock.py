"""One process per run directory, by a lock of the kernel's that dies with its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from ftcli.errors import ExitCode, FtcliError
from ftcli.run.atomic import open_regular, utc_now

#: Name of the lock file. It stays behind when a run ends; what counts is the kernel's lock on it, not the file.
LOCK_NAME = ".lock"

_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EAGAIN})


class DirectoryLock:
    """An exclusive ``flock`` on ``<directory>/.lock``, held until :meth:`release` or the end of the process.

    Forked children (data workers) close their copy of the descriptor, so an orphan cannot keep the lock of a
    killed run. ``supported`` is False where the file system has no locks; nothing is then held.
    """

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            FtcliError: FT720 when another process holds it.
            OSError: the lock file cannot be made, is a pipe, or is a link: what it leads to would be written over.
        """
        self._path = directory / LOCK_NAME
        self._descriptor: int | None = None
        self.supported = True
        while (descriptor := self._take()) is None:
            continue
        self._descriptor = descriptor
        _close_in_children(self)

    def _take(self) -> int | None:
        """Open and lock the file; None when it was replaced in between, so that it has to be tried again."""
        descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            self._lock(descriptor)
            if self._is_current(descriptor):
                owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": utc_now()})
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, owner.encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _lock(self, descriptor: int) -> None:
        for last in (False, False, True):
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _UNSUPPORTED:
                    self.supported = False
                    return None
                if error.errno not in _BUSY:
                    raise
                if last:
                    raise self._held_elsewhere(descriptor) from error
                time.sleep(0.05)  # it may be is_locked() of another process, which holds it for microseconds
        return None

    def _is_current(self, descriptor: int) -> bool:
        """True if the locked file is still the one of that name: `resume: never` renames the folder with its lock."""
        mine = os.fstat(descriptor)
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (now.st_dev, now.st_ino)

    def _held_elsewhere(self, descriptor: int) -> FtcliError:
        owner: dict[str, object] = {}
        with contextlib.suppress(ValueError, RecursionError):  # the owner may be just writing its name
            owner = json.loads(os.pread(descriptor, 4096, 0))
        who = f"process {owner['pid']} on {owner['host']}, started {owner['started']}" if owner else "another process"
        return FtcliError.single(
            "FT720",
            f"{self._path.parent} is in use by {who}",
            exit_code=ExitCode.RECIPE,
            help="wait until that run ends, or give this one its own --output-dir",
        )

    def release(self) -> None:
        """Give the lock back; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def forget(self) -> None:
        """Close this process's copy of the descriptor after a fork; the parent's lock stays."""
        self.release()


def _close_in_children(lock: DirectoryLock) -> None:
    """A fork shares the lock with the child, and the kernel frees it only when all copies are closed."""
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held.forget()

    os.register_at_fork(after_in_child=close)


def is_locked(directory: Path) -> bool:
    """True if some process holds the directory's lock right now; False where there is no lock file.

    True also where the file may not be opened: nobody knows then, and what a process may hold is not called free.
    """
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _BUSY
    finally:
        os.close(descriptor)
    return False
