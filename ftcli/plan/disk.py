"""Bytes that a run writes, and the room for them."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ftcli.config.recipe import Recipe
from ftcli.paths import exists, is_too_deep
from ftcli.plain import JsonObject, plain_fields
from ftcli.plan.trained import TrainedParameters, optimizer_state
from ftcli.tables import optimizers

#: Tokenizer, states of random generators, metrics and the report.
_SMALL_FILES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """Bytes on disk: one checkpoint, how many stand there at most, and the result. A new checkpoint is complete before
    the oldest is removed, so there is one more than ``checkpoint.keep_last``. ``free_bytes`` is None where nobody
    looked.
    """

    checkpoint_bytes: int
    checkpoints: int
    result_bytes: int
    free_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Most that the run directory holds at once."""
        return self.checkpoint_bytes * self.checkpoints + self.result_bytes

    def as_dict(self) -> JsonObject:
        return {**plain_fields(self), "total_bytes": self.total_bytes}


def estimate_disk(
    recipe: Recipe, trained: TrainedParameters, others: int, *, free_bytes: int | None, element_bytes: int = 4
) -> DiskEstimate:
    """Estimates the bytes that training writes. ``others``: parameters that are not trained, which a full result holds
    as well; ``element_bytes``: of one trained parameter.
    """
    weights = element_bytes * (trained.elements + (others if recipe.lora is None else 0))
    # Without periodic checkpoints one is written when the run is interrupted.
    every, steps = recipe.checkpoint.every_steps, recipe.train.max_steps
    periodic = every is not None and (steps is None or every <= steps)
    count = recipe.checkpoint.keep_last + 1 if periodic else 1
    count += recipe.checkpoint.keep_best
    state = optimizer_state(recipe.train.optim, trained).total
    if optimizers.row(recipe.train.optim).schedule_free:  # its average is not what training goes on with
        state += weights
    return DiskEstimate(weights + state + _SMALL_FILES, count, weights + _SMALL_FILES, free_bytes)


def existing_ancestor(path: Path) -> Path:
    """``path`` or the nearest of its parents that exists (in any form)."""
    path = path.absolute()
    while not exists(path) and path != path.parent:
        path = path.parent
    return path


def free_disk_bytes(folder: Path) -> int | None:
    """Free bytes for this user on the disk of an existing folder; None where the system does not say."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def why_no_folder(path: Path) -> str | None:
    """The reason why no folder can be made at a path, whoever may write around it; None if none is known."""
    if is_too_deep(path):
        return "it has too many folders within each other"
    try:
        path.lstat()
        path.stat()
    except FileNotFoundError:
        return "it is a link that leads nowhere" if path.is_symlink() else None
    except NotADirectoryError:
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def why_not_writable(folder: Path) -> str | None:
    """The reason why nothing can be written into an existing folder, or None. Tried with a temporary file: permission
    bits know nothing of read-only and full disks, nor of the superuser.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ftcli")
    except OSError as error:
        return error.strerror or str(error)
    return None
