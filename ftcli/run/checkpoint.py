"""Checkpoints that are complete or absent, whatever kills the process while it writes one.

A checkpoint is filled in a hidden folder, every file is flushed to the disk, ``complete.json`` lists the files
with their sizes, and one rename gives the folder its name ``step-00000100``. A folder of that name whose files do
not match its list was damaged later; it is passed over with a warning, and the one before it is used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.errors import Finding
from ftcli.run.atomic import (
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    first_free,
    fsync_directory,
    fsync_tree,
    remove_tree,
    rename_directory,
    storage_error,
    storage_errors,
    write_json,
)
from ftcli.run.clock import utc_now

#: The list of files that makes a folder a checkpoint.
COMPLETE_NAME = "complete.json"
#: Files up to this size are also held to their SHA-256; hashing gigabytes of optimizer state would cost minutes.
HASHED_BYTES = 1 << 20

_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The folder name of a step's checkpoint: ``step-00000100``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name, or None when it has none."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _step_number(path: Path) -> int:
    return step_of(path) or 0


@dataclass(frozen=True, slots=True)
class Scan:
    """What a folder of checkpoints holds: usable ones by rising step, and a warning for each damaged one."""

    usable: tuple[Path, ...]
    damaged: tuple[Path, ...]
    warnings: tuple[Finding, ...]

    @property
    def newest(self) -> Path | None:
        """The usable checkpoint of the highest step."""
        return self.usable[-1] if self.usable else None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every listed file is there in its full size.

    Small files are compared by SHA-256 as well, large ones by size only.
    """
    try:
        raw: Any = json.loads((checkpoint / COMPLETE_NAME).read_text(encoding="utf-8"))
        files = [(str(f["name"]), int(f["bytes"]), f.get("sha256")) for f in raw["files"]]
    except FileNotFoundError:
        return f"{COMPLETE_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{COMPLETE_NAME} is not readable ({error})"
    for name, size, digest in files:
        path = checkpoint / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if digest is not None and _sha256(path) != digest:
                return f"{name} has other content than was written"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


class Checkpoints:
    """The checkpoints of one run, in ``root``. One process at a time may write (the run directory's lock)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is or will be."""
        return self.root / step_name(step)

    def clean(self) -> None:
        """Remove what a crash left behind: half-written checkpoints and half-deleted ones.

        A checkpoint that was set aside to be replaced by a new one of the same step, which then never came, gets
        its name back.

        Raises:
            FtcliError: FT723 when the folder cannot be changed.
        """
        if not self.root.is_dir():
            return
        with storage_errors(self.root):
            for leftover in sorted(self.root.iterdir()):
                if leftover.name.startswith(TRASH_PREFIX):
                    self._restore_or_delete(leftover)
                elif leftover.name.startswith(TEMPORARY_PREFIX):
                    _delete(leftover)

    def _restore_or_delete(self, trash: Path) -> None:
        match = _NAME.match(trash.name.removeprefix(TRASH_PREFIX + "replaced-"))
        if match and not self.path(int(match[1])).exists() and damage(trash) is None:
            rename_directory(trash, self.path(int(match[1])))
        else:
            _delete(trash)

    def scan(self) -> Scan:
        """Look at every checkpoint: which are usable, and FT726 for each that is damaged."""
        usable: list[Path] = []
        damaged: list[Path] = []
        warnings: list[Finding] = []
        for step in sorted(self._steps()):
            path = self.path(step)
            reason = damage(path)
            if reason is None:
                usable.append(path)
                continue
            damaged.append(path)
            message = f"checkpoint {path} is damaged and is passed over: {reason}"
            warnings.append(Finding("FT726", message, severity="warning"))
        return Scan(tuple(usable), tuple(damaged), tuple(warnings))

    def list_complete(self) -> tuple[Path, ...]:
        """The usable checkpoints by rising step."""
        return self.scan().usable

    def newest(self) -> Path | None:
        """The usable checkpoint of the highest step, or None."""
        for step in sorted(self._steps(), reverse=True):
            if damage(self.path(step)) is None:
                return self.path(step)
        return None

    @contextlib.contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        """Yield an empty folder to fill; when the block ends it becomes the checkpoint of ``step``.

        If the block raises, the folder is removed and nothing has changed.

        Raises:
            FtcliError: FT724 when the disk is full, FT723 when it cannot be written otherwise; also in place of an
                OSError that the block raises, and of any error at a moment when the disk is full.
        """
        staged = self.root / f"{TEMPORARY_PREFIX}{step_name(step)}.{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _delete(staged)
            staged.mkdir()
            yield staged
            self._complete(staged, step)
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            raise storage_error(error, self.path(step)) from error
        except BaseException as error:
            full = isinstance(error, Exception) and _is_full(self.root)
            shutil.rmtree(staged, ignore_errors=True)
            if full:  # torch and safetensors report a full disk as errors of their own
                raise storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.path(step)) from error
            raise

    def _complete(self, staged: Path, step: int) -> None:
        fsync_tree(staged)
        write_json(
            staged / COMPLETE_NAME, {"format": 1, "step": step, "written": utc_now(), "files": _inventory(staged)}
        )
        final = self.path(step)
        replaced = None
        if os.path.lexists(final):
            replaced = first_free(f"{TRASH_PREFIX}replaced-{final.name}.{{n}}", self.root)
            rename_directory(final, replaced)
        rename_directory(staged, final)
        if replaced is not None:
            shutil.rmtree(replaced)

    def rotate(self, keep_last: int) -> None:
        """Delete all but the newest ``keep_last`` usable checkpoints.

        Damaged ones do not count as kept and are deleted only when they are older than a usable one that stays.

        Raises:
            FtcliError: FT723 when a folder cannot be removed.
        """
        scan = self.scan()
        kept = scan.usable[-max(1, keep_last) :]
        if not kept:
            return
        oldest_kept = _step_number(kept[0])
        old = [path for path in (*scan.usable, *scan.damaged) if _step_number(path) < oldest_kept]
        for path in old:
            with storage_errors(path):
                remove_tree(path)

    def set_aside_after(self, step: int) -> tuple[Path, ...]:
        """Rename the checkpoints of steps above ``step`` to ``step-….superseded-N``: an earlier one is continued.

        They are never deleted by ftcli. Returns their new paths.

        Raises:
            FtcliError: FT723 when a folder cannot be renamed.
        """
        moved = []
        for later in sorted(s for s in self._steps() if s > step):
            aside = first_free(f"{step_name(later)}.superseded-{{n}}", self.root)
            with storage_errors(self.path(later)):
                rename_directory(self.path(later), aside)
            moved.append(aside)
        return tuple(moved)

    def _steps(self) -> Sequence[int]:
        if not self.root.is_dir():
            return ()
        return [step for p in self.root.iterdir() if (step := step_of(p)) is not None and p.is_dir()]


def _inventory(folder: Path) -> list[dict[str, Any]]:
    """Name, size and (small files) SHA-256 of every file below ``folder``."""
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        entry: dict[str, Any] = {"name": path.relative_to(folder).as_posix(), "bytes": size}
        if size <= HASHED_BYTES:
            entry["sha256"] = _sha256(path)
        files.append(entry)
    return files


def _is_full(folder: Path) -> bool:
    """Whether the disk of ``folder`` has less than a megabyte left."""
    try:
        return shutil.disk_usage(folder).free < 1 << 20
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    fsync_directory(path.parent)
