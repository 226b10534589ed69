"""The files of a run directory, by name; and its lock: one process per directory, freed by the kernel at its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from ftcli.errors import FtcliError, first_line
from ftcli.paths import RUN_RECIPE
from ftcli.run.atomic import open_regular, utc_now
from ftcli.run.checkpoint import Checkpoints

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
        """Take the lock. Raises FtcliError FT720 when another process holds it, OSError where the lock file cannot be
        made, is a pipe, or is a link: what it leads to would be written over.
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
        help = "wait until that run ends, or give this one its own --output-dir"
        return FtcliError.single("FT720", f"{self._path.parent} is in use by {who}", help=help)

    def release(self) -> None:
        """Give the lock back; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _close_in_children(lock: DirectoryLock) -> None:
    """A fork shares the lock with the child, and the kernel frees it only when all copies are closed."""
    reference = weakref.ref(lock)

    def close() -> None:
        held = reference()
        if held is not None:
            held.release()  # the parent's lock stays

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


class _Inside:
    """The path of a file or folder of a run, by its name there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, _: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths of one run. Making one touches no disk."""

    path: Path

    #: The recipe as resolved; a folder with this file is a run directory.
    recipe_path = _Inside(RUN_RECIPE)
    #: Versions, device, seeds, dtype plan, kernels, data fingerprints.
    manifest_path = _Inside("manifest.json")
    #: One JSON line per logging step.
    metrics_path = _Inside("metrics.jsonl")
    #: The resumable states.
    checkpoints_dir = _Inside("checkpoints")
    #: The trained adapter in PEFT's layout (LoRA).
    adapter_dir = _Inside("adapter")
    #: The trained model in transformers' layout (full fine-tuning).
    model_dir = _Inside("model")
    #: Folder of the exported formats.
    export_dir = _Inside("export")
    #: Evaluation results and samples.
    eval_path = _Inside("eval.json")
    #: Held-out pairs, or labelled answers, one by one.
    margins_path = _Inside("margins.json")
    #: Folder of the completions of training by rewards, step by step.
    completions_dir = _Inside("completions")
    #: Tokens kept, cut and masked per dataset.
    tokens_path = _Inside("tokens.json")
    #: The report for people.
    report_path = _Inside("report.html")
    #: The run's state, for scripts.
    status_path = _Inside("status.json")

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.checkpoints_dir)

    @property
    def result_dir(self) -> Path | None:
        """``adapter/`` or ``model/``, whichever is there; None before training has ended."""
        return next((folder for folder in (self.adapter_dir, self.model_dir) if folder.is_dir()), None)


#: Files and folders of a run, by name.
NAMES = frozenset(one.name for one in vars(RunDirectory).values() if isinstance(one, _Inside)) | {
    "tensorboard",
    LOCK_NAME,
}


def holds_run(run: RunDirectory) -> bool:
    """True if the folder has a recipe.yaml and something else of a run: one with nothing but a recipe is never renamed.
    Raises OSError.
    """
    ours = (run.status_path, run.path / LOCK_NAME, run.checkpoints_dir)
    return run.recipe_path.is_file() and any(path.exists() for path in ours)


def run_that_owns(path: Path) -> Path | None:
    """The run directory of which ``path`` would be a file, or lie in a folder; None where it is no run's."""
    for folder in path.parents:
        if path.relative_to(folder).parts[0] in NAMES and is_run_directory(folder):
            return folder
    return None


def is_run_directory(path: Path) -> bool:
    """True if ``path`` is a folder with a recipe.yaml that ftcli wrote."""
    with contextlib.suppress(OSError):
        return holds_run(RunDirectory(path))
    return False


def no_run(path: Path, reason: str) -> FtcliError:
    """FT722: the folder is not a run."""
    help = "choose another --output-dir; ftcli does not mix its files with others"
    return FtcliError.single("FT722", f"{path} is not a run directory: {reason}", help=help)


def unreadable_file(path: Path, error: Exception) -> FtcliError:
    """FT727: a file of the run cannot be read."""
    help = "restore the file, or start over with --resume never, which keeps the old run beside it"
    return FtcliError.single("FT727", f"{path} cannot be read: {first_line(error)}", help=help)
