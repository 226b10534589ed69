"""Objectives over a fixed set of rows, in an order of each epoch, and the sums that their metrics are means of."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ftcli.data.order import STREAM, Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.plain import JsonObject
from ftcli.run.metrics import MetricsLine
from ftcli.train.checkpoint_state import Progress, draw_of_epoch
from ftcli.train.loop import Objective, StepMonitor
from ftcli.train.parallel import MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup
    from ftcli.train.on_rows import ObjectiveParts


class EpochObjective(Objective):
    """The units of each epoch, split over ranks, micro-batches and steps.

    Args:
        model: What learns.
        epochs: What an epoch holds, and in which order.
    """

    def __init__(
        self, job: Job, model: PreTrainedModel | PeftModel, epochs: Epochs, **parts: Unpack[ObjectiveParts]
    ) -> None:
        group, sequence = parts["group"], parts["sequence"]
        self._group, self._stack, self._sequence = group, parts["stack"], sequence
        self._model, self._device, self._dtypes = model, job.device, job.dtypes
        train, shares = job.recipe.train, 1 if sequence is None else sequence.parts
        self._alone, self._pixels = group is None, job.pixel_reader()
        self._rank, self._ranks = (0, 1) if group is None else (group.rank // shares, group.size // shares)
        self._size, self._accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
        self.use(epochs)

    def use(self, epochs: Epochs) -> None:
        """Trains on these epochs, or on this window of a stream, from here on."""
        self._epochs, self._epoch = epochs, 0 if epochs.stream is None else epochs.stream.number
        self._order, self._next = self.order(self._epoch), 0
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
        """Number of passes over all data after so many steps; of a stream those that are over."""
        if self._epochs.stream is not None:
            return float(self._epochs.stream.passes)
        epoch, index = divmod(step, self.steps_per_epoch)
        return epoch + index * self._accumulation / self._turns

    def micro_batches(self, step: int, monitor: StepMonitor) -> list[MicroBatch]:
        """This rank's micro-batches of the optimizer step after ``step`` finished ones, on the host."""
        stream = self._epochs.stream
        if stream is not None and step - stream.first_step >= self.steps_per_epoch:
            monitor.check_finite()  # while the rows that it would name are there
            self.use(stream.following(step))
        begun = 0 if stream is None else stream.first_step
        epoch, index = divmod(step - begun, self.steps_per_epoch)
        if stream is None and epoch != self._epoch:
            self._epoch, self._order = epoch, self.order(epoch)
        if index == 0 and self._alone:
            draw_of_epoch()
        first = index * self._accumulation
        found = []
        for units in self._order[first : first + self._accumulation]:
            blank = units[0] == self._epochs.units  # the unit after the last one stands for a batch without labels
            found.append(self.micro_batch([0] if blank else units, blank=blank))
        self._next = first + self._accumulation
        return found

    def launched(self, number: int) -> None:
        """Begins to read the images of the next step's micro-batch of this number. Threads that read take Python's lock
        by turns: any earlier, this one's launches would wait for them, and the device for its launches.
        """
        if self._pixels is not None and self._next + number < len(self._order):
            units = self._order[self._next + number]
            self._pixels.ahead([] if units[0] == self._epochs.units else [self.documents(units)])

    def documents(self, units: Sequence[int]) -> list[TokenizedRow]:
        """The rows of these units in turn."""
        return [tokens for unit in units for tokens in self._epochs.members(unit)]

    def metrics(self) -> MetricsLine:
        """With images, the seconds for which steps waited for them since the last line."""
        if self._pixels is None or not self._pixels.waited:
            return {}
        waited, self._pixels.waited = self._pixels.waited, 0.0
        return {"image_wait_seconds": waited}

    def state(self) -> JsonObject:
        """Of a stream, where its window began."""
        return {} if self._epochs.stream is None else {STREAM: self._epochs.stream.state()}


class StepSums:
    """A vector of sums since the last line of metrics, float64 on the device; the same on one process as on many ranks.

    Args:
        name: Its key in a checkpoint.
        width: Numbers in the vector.
    """

    def __init__(self, name: str, width: int, device: torch.device, group: RankGroup | None) -> None:
        self._name, self._width, self._device, self._group = name, width, device, group
        self._sums = self._before = torch.zeros(width, dtype=torch.float64, device=device)
        self._of_batches: list[Tensor] = []

    def begin(self) -> None:
        """A step begins; :meth:`undo` goes back to here."""
        self._before, self._of_batches = self._sums, []

    def add(self, vector: Tensor) -> None:
        """Notes a micro-batch, (width,) float64."""
        self._of_batches.append(vector)

    def reduce(self) -> None:
        """Adds up the micro-batches of all ranks, in the order of one process."""
        found = torch.stack(self._of_batches)
        if self._group is not None:
            slots = torch.zeros(len(found) * self._group.size, self._width, dtype=torch.float64, device=found.device)
            slots[self._group.rank :: self._group.size] = found
            self._group.all_reduce([slots])
            found = slots
        for one in found:
            self._sums = self._sums + one

    def add_once(self, vector: Tensor) -> None:
        """Adds what is the step's, and the same on all ranks."""
        self._sums = self._sums + vector

    def undo(self) -> None:
        """Forgets what came since :meth:`begin`."""
        self._sums = self._before

    def take(self) -> list[float]:
        """The sums; they begin anew."""
        found = self._sums.tolist()
        self._sums = torch.zeros_like(self._sums)
        return found

    def state(self) -> JsonObject:
        return {self._name: self._sums.tolist()}

    def restore(self, state: JsonObject) -> None:
        """Continues from what :meth:`state` gave; a checkpoint without it begins at zero."""
        kept = state.get(self._name)
        if isinstance(kept, list) and len(kept) == self._width:
            self._sums = torch.tensor(kept, dtype=torch.float64, device=self._device)


class SummedObjective(EpochObjective):
    """An objective over pairs or labelled answers, whose metrics are means over these.

    Where ranks share rows, each of them computes the loss of whole rows, and the first one counts it.

    Args:
        name, width: Of the sums, as :class:`StepSums`.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        name: str,
        width: int,
        **parts: Unpack[ObjectiveParts],
    ) -> None:
        super().__init__(job, model, epochs, **parts)
        self._counts = self._sequence is None or self._sequence.part == 0
        self._sums = StepSums(name, width, job.device, self._group)

    def counted_batch(
        self, inputs: dict[str, Tensor], units: Sequence[int], counts: TokenCounts, *, blank: bool
    ) -> MicroBatch:
        """The micro-batch of ``inputs``; a blank one, and one of a rank that does not count, has computed its tokens
        alone.
        """
        counted = TokenCounts(computed=counts.computed) if blank or not self._counts else counts
        return MicroBatch(inputs, () if blank else tuple(units), counted)

    def noted(self, loss: Tensor, sums: Tensor) -> Tensor:
        """The loss of a micro-batch, whose ``sums`` (width,) float64 are noted; where this rank does not count, zero
        with the same gradient.
        """
        self._sums.add(sums if self._counts else torch.zeros_like(sums))
        return loss if self._counts else loss - loss.detach()

    def begin(self, step: int) -> None:
        """Notes the sums so far."""
        self._sums.begin()

    def reduced(self) -> None:
        """Adds up the metrics of all ranks' micro-batches, in the order of one process."""
        self._sums.reduce()

    def undo(self, step: int) -> None:
        """Restores the sums that :meth:`begin` has noted."""
        self._sums.undo()

    def state(self) -> JsonObject:
        return self._sums.state()

    def restore(self, state: JsonObject, progress: Progress) -> None:
        self._sums.restore(state)


@dataclass(frozen=True, slots=True)
class RunSteps:
    """The steps of a run: how many there are, of so many units each over all ranks, and of an epoch."""

    total: int
    of_epoch: int
    units: int


def steps_of(job: Job, epochs: Epochs, group: RankGroup | None) -> RunSteps:
    """The steps that the loop takes."""
    train, ranks = job.recipe.train, 1
    if group is not None:
        ranks = group.size // job.recipe.launch.context_parallel_size
    units = train.per_device_train_batch_size * ranks * train.gradient_accumulation_steps
    of_epoch = math.ceil(len(epochs) / units)
    return RunSteps(train.max_steps or math.ceil(train.num_train_epochs * of_epoch), of_epoch, units)


def seen_units(epochs: Epochs, steps: RunSteps) -> tuple[Sequence[int], bool]:
    """The units that training sees, and whether it sees some of them more than once."""
    if steps.total >= steps.of_epoch:
        return range(epochs.units), steps.total > steps.of_epoch or len(epochs) > epochs.units
    seen = epochs.order(0)[: steps.total * steps.units]
    return sorted(set(seen)), len(set(seen)) < len(seen)
