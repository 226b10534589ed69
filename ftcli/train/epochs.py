"""Objectives over a fixed set of rows, in an order of each epoch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcli.data.order import Epochs
from ftcli.errors import Origin
from ftcli.train.checkpoint_state import draw_of_epoch
from ftcli.train.loop import Objective, StepMonitor
from ftcli.train.parallel import MicroBatch

if TYPE_CHECKING:
    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup


class EpochObjective(Objective):
    """The units of each epoch, split over ranks, micro-batches and steps.

    Args:
        epochs: What an epoch holds, and in which order.
        shares: Ranks that share each row.
    """

    def __init__(self, job: Job, epochs: Epochs, group: RankGroup | None, shares: int = 1) -> None:
        train = job.recipe.train
        self._epochs, self._alone = epochs, group is None
        self._rank, self._ranks = (0, 1) if group is None else (group.rank // shares, group.size // shares)
        self._size, self._accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
        self._epoch, self._order = 0, self.order(0)
        self._turns = len(self._order)
        self.steps_per_epoch = -(-self._turns // self._accumulation)

    @abstractmethod
    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The micro-batch of these units, on the host; a ``blank`` one bears no loss."""

    def order(self, epoch: int) -> list[list[int]]:
        """The units of each of this rank's micro-batches of an epoch."""
        return self._epochs.batches(epoch, self._size, self._rank, self._ranks)

    def row_origins(self, row: int) -> Sequence[Origin]:
        """The rows of data files that a unit holds."""
        return list(dict.fromkeys(tokens.row.origin for tokens in self._epochs.members(row)))

    def epochs_done(self, step: int) -> float:
        """Number of passes over all data after so many steps."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch + index * self._accumulation / self._turns

    def micro_batches(self, step: int, monitor: StepMonitor) -> list[MicroBatch]:
        """This rank's micro-batches of the optimizer step after ``step`` finished ones, on the host."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.order(epoch)
        if index == 0 and self._alone:
            draw_of_epoch()
        first = index * self._accumulation
        found = []
        for units in self._order[first : first + self._accumulation]:
            blank = units[0] == self._epochs.units  # the unit after the last one stands for a batch without labels
            found.append(self.micro_batch([0] if blank else units, blank=blank))
        return found
