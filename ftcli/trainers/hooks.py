"""What the pipeline gives a trainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftcli.run.completions import ScoredCompletion
from ftcli.trainers.best import EarlyStopping


class CheckpointStore(Protocol):
    """Where checkpoints go (ftcli.run.checkpoint)."""

    def staging(self, step: int) -> AbstractContextManager[Path]:
        """A folder to write into; it becomes the checkpoint of ``step`` when the block ends well."""
        ...

    def rotate(self, keep_last: int, spared: Collection[int] = ()) -> None:
        """Removes all but the newest complete checkpoints, and those of ``spared`` steps."""
        ...


def not_interruptible(_phase: str) -> AbstractContextManager[None]:
    """A block that a signal does not end."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class TrainerHooks:
    """Storage, evaluation, and how many checkpoints to keep.

    With ``keep_best`` the checkpoint of the best evaluation is saved and kept; ``stopping`` ends training early.
    ``before_checkpoint`` puts the metrics on disk, so that no checkpoint is ahead of them. ``interruptible`` is entered
    around evaluation, which is told the step: a signal raises StopRequested in it. ``completions`` takes what a model
    that learns from rewards said at a logging step.
    """

    checkpoints: CheckpointStore | None
    keep_last: int
    evaluate: Callable[[int], dict[str, float]] | None
    before_checkpoint: Callable[[], None] | None = None
    interruptible: Callable[[str], AbstractContextManager[None]] = not_interruptible
    keep_best: bool = False
    stopping: EarlyStopping | None = None
    completions: Callable[[int, Sequence[ScoredCompletion]], None] | None = None
