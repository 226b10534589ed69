"""Checkpoints that are complete or absent, whatever kills the process while it writes one.

A checkpoint is written into a hidden folder. Every file is flushed to the disk and listed in ``complete.json`` with its
size and digest; then one rename gives the folder its name, ``step-00000100``. A folder of that name whose files do not
match the list was damaged later. It is passed over with a warning, and the checkpoint before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.errors import Finding, FtcliError
from ftcli.plain import JsonMap, JsonObject
from ftcli.run import atomic

#: The list of files that makes a folder a checkpoint.
COMPLETE_NAME = "complete.json"
#: What a trainer keeps in a checkpoint besides weights and optimizer; the best evaluation so far is in it.
STATE_NAME = "ftcli_state.json"
#: transformers' own file about how training stood.
TRAINER_STATE = "trainer_state.json"
#: Files of a checkpoint that say how training stood, and are no part of a model.
PROGRESS = (TRAINER_STATE, STATE_NAME, COMPLETE_NAME)
#: Files up to this size are compared by SHA-256 whenever checkpoints are listed. Larger ones are compared when a run
#: resumes from their checkpoint, because it has to read them anyway.
QUICK_BYTES = 1 << 20
#: Larger files are hashed in blocks of this size, several at a time.
_BLOCK_BYTES = 4 << 20
_HASHING_THREADS = 8
#: What the digest of such a file is called.
_OF_BLOCKS = "sha256_of_blocks"

_NAME = re.compile(r"step-(\d{8,})")
#: In the name of one that makes room for another of its step, and gets its own back where that is never complete.
_REPLACED = "replaced-"


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
class FoundCheckpoints:
    """Checkpoints of a folder: usable ones by rising step, and damaged ones with what is wrong."""

    usable: tuple[Path, ...]
    damaged: Mapping[Path, str]

    @property
    def newest(self) -> Path | None:
        """The usable checkpoint of the highest step."""
        return self.usable[-1] if self.usable else None

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """FT726 for each that is damaged."""
        texts = [f"checkpoint {path} is damaged and is skipped: {reason}" for path, reason in self.damaged.items()]
        return tuple(Finding("FT726", text, severity="warning") for text in texts)


def damage(checkpoint: Path, *, thorough: bool = False) -> str | None:
    """Describes the damage of a checkpoint folder; None when every listed file is there in its full size.

    Small files are compared by SHA-256 as well. With ``thorough`` all files are, which reads every byte.
    """
    try:
        raw: Any = atomic.json_object_in(checkpoint / COMPLETE_NAME)
        return difference(checkpoint, raw["files"], thorough=thorough)
    except FileNotFoundError:
        return f"{COMPLETE_NAME} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"{COMPLETE_NAME} is not readable ({error})"


def difference(folder: Path, files: Sequence[JsonMap], *, thorough: bool) -> str | None:
    """The first of ``files``, as :func:`inventory` lists them, that is not in ``folder`` as it was written. Raises
    ValueError, KeyError, TypeError, AttributeError: the list is none.
    """
    for each in files:
        name, size = str(each["name"]), int(each["bytes"])
        digest = each.get("sha256") or each.get(_OF_BLOCKS)  # ftcli 0.1 called both sha256
        path = folder / name
        try:
            found = path.stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if digest is not None and (thorough or size <= QUICK_BYTES) and _digest(path) != digest:
                return f"{name} differs from what was written"
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            return f"{name} cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


class Checkpoints:
    """The checkpoints of one run, in ``root``. One process at a time may write (the run directory's lock)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Path of the checkpoint of ``step``, written or not."""
        return self.root / step_name(step)

    def clean(self) -> None:
        """Removes half-written and half-deleted checkpoints of a crash. One that was renamed to make room for a new one
        of the same step gets its name back when that was never completed. Raises FtcliError FT723.
        """
        if not self.root.is_dir():
            return
        with atomic.storage_errors(self.root):
            for leftover in sorted(self.root.iterdir()):
                if leftover.name.startswith(atomic.TRASH_PREFIX):
                    self._restore_or_delete(leftover)
                elif leftover.name.startswith(atomic.TEMPORARY_PREFIX):
                    atomic.delete(leftover)

    def _restore_or_delete(self, trash: Path) -> None:
        match = _NAME.match(trash.name.removeprefix(atomic.TRASH_PREFIX + _REPLACED))
        if match and not self.path(int(match[1])).exists() and damage(trash) is None:
            atomic.rename_directory(trash, self.path(int(match[1])))
        else:
            atomic.delete(trash)

    def scan(self) -> FoundCheckpoints:
        """Look at every checkpoint: which are usable, and which are damaged."""
        found = {path: damage(path) for path in map(self.path, sorted(self._steps()))}
        usable = tuple(path for path, reason in found.items() if reason is None)
        return FoundCheckpoints(usable, {path: reason for path, reason in found.items() if reason is not None})

    def newest(self) -> Path | None:
        """The usable checkpoint of the highest step, or None."""
        for step in sorted(self._steps(), reverse=True):
            if damage(self.path(step)) is None:
                return self.path(step)
        return None

    def named(self, name: str) -> Path:
        """The usable checkpoint of a step, written as a number, or of the ``best`` evaluation. Raises FtcliError FT725
        (exit 2) when there is none, with those that there are.
        """
        usable = self.scan().usable
        step = _best_step(usable) if name == "best" else int(name) if name.isdecimal() and len(name) < 12 else None
        if step is not None and self.path(step) in usable:
            reason = damage(self.path(step), thorough=True)
            if reason is None:
                return self.path(step)
            help = "restore the file, or take another checkpoint"
            raise FtcliError.single("FT725", f"{self.path(step)} is damaged: {reason}", help=help)
        steps = ", ".join(str(step_of(path)) for path in usable) or "none"
        what = "best evaluation" if name == "best" else f"step {name}"
        help = f"choose from: {steps}; `checkpoint.keep_best: true` keeps the best one"
        raise FtcliError.single("FT725", f"{self.root} has no usable checkpoint of {what}", help=help)

    @contextlib.contextmanager
    def staging(self, step: int) -> Iterator[Path]:
        """Yield an empty folder to fill; when the block ends it becomes the checkpoint of ``step``. If the block
        raises, nothing has changed.

        Raises FtcliError FT724 when the disk is full, FT723 when the folder cannot be written otherwise; other
        libraries' errors about a failed write are raised as these as well.
        """
        staged = self.root / f"{atomic.TEMPORARY_PREFIX}{step_name(step)}.{os.getpid()}"
        try:
            # Without its parents: where the run directory has vanished, half of it must not come back.
            self.root.mkdir(exist_ok=True)
            atomic.delete(staged)
            staged.mkdir()
            with atomic.writing_into(staged, self.path(step)):
                yield staged
                complete = {"format": 1, "step": step, "written": atomic.utc_now(), "files": inventory(staged)}
                atomic.write_json(staged / COMPLETE_NAME, complete)
                atomic.replace_directory(staged, self.path(step), _REPLACED)
        except OSError as error:
            raise atomic.storage_error(error, self.path(step)) from error
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def newest_sound(self) -> FoundCheckpoints:
        """Like :meth:`scan`, but every byte of the newest usable checkpoint is read and compared.

        A checkpoint that fails is passed over with a warning, and the one before it is read.
        """
        scan = self.scan()
        usable, damaged = list(scan.usable), dict(scan.damaged)
        while usable and (reason := damage(usable[-1], thorough=True)) is not None:
            damaged[usable.pop()] = reason
        return FoundCheckpoints(tuple(usable), damaged)

    def rotate(self, keep_last: int, spared: Collection[int] = ()) -> None:
        """Delete all but the newest ``keep_last`` usable checkpoints and those of ``spared`` steps; of damaged ones
        those that are older than a usable one that stays. Raises FtcliError FT723.
        """
        scan = self.scan()
        kept = scan.usable[-max(1, keep_last) :]
        if not kept:
            return
        oldest_kept = _step_number(kept[0])
        older = [path for path in (*scan.usable, *scan.damaged) if _step_number(path) < oldest_kept]
        old = [path for path in older if _step_number(path) not in spared]
        for path in old:
            with atomic.storage_errors(path):
                atomic.remove_tree(path)

    def set_aside_after(self, step: int) -> tuple[Path, ...]:
        """Renames the checkpoints of later steps than ``step``, which a run continues from, to ``step-….superseded-N``,
        and returns these paths; ftcli never deletes them. Raises FtcliError FT723.
        """
        moved = []
        for later in sorted(s for s in self._steps() if s > step):
            aside = atomic.first_free(f"{step_name(later)}.superseded-{{n}}", self.root)
            with atomic.storage_errors(self.path(later)):
                atomic.rename_directory(self.path(later), aside)
            moved.append(aside)
        return tuple(moved)

    def _steps(self) -> Sequence[int]:
        if not self.root.is_dir():
            return ()
        return [step for p in self.root.iterdir() if (step := step_of(p)) is not None and p.is_dir()]


def _best_step(usable: Sequence[Path]) -> int | None:
    """The step of the best evaluation, as the newest checkpoint knows it."""
    for path in reversed(usable):
        best = atomic.read_json_object(path / STATE_NAME).get("best")
        if isinstance(best, dict) and isinstance(best.get("step"), int) and best.get("value") is not None:
            return int(best["step"])
    return None


def inventory(folder: Path) -> list[JsonObject]:
    """Name, size and digest of every file below ``folder``, but hidden ones. Raises OSError."""
    names = (p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file())
    return [_identity(folder, name.as_posix()) for name in names if not any(s.startswith(".") for s in name.parts)]


def _identity(folder: Path, name: str) -> JsonObject:
    size = (folder / name).stat().st_size
    return {"name": name, "bytes": size, "sha256" if size <= _BLOCK_BYTES else _OF_BLOCKS: _digest(folder / name)}


def _digest(path: Path) -> str:
    """SHA-256 of a file; of a large one, the SHA-256 of the digests of its blocks, which several threads compute: one
    would take a minute for 90 GB. Raises OSError.
    """
    descriptor = atomic.open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size <= _BLOCK_BYTES:
            return hashlib.sha256(os.pread(descriptor, size, 0)).hexdigest()
        with ThreadPoolExecutor(_HASHING_THREADS) as threads:
            starts = range(0, size, _BLOCK_BYTES)
            blocks = threads.map(lambda at: hashlib.sha256(os.pread(descriptor, _BLOCK_BYTES, at)).digest(), starts)
            return hashlib.sha256(b"".join(blocks)).hexdigest()
    finally:
        os.close(descriptor)
