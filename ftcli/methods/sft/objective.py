"""What supervised fine-tuning learns from: rows in the order of each epoch, and the mean loss of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ftcli.data.collate import EpochCollator
from ftcli.data.order import Epochs, plain_epochs
from ftcli.data.parts import part_of
from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import compute_context, head_of
from ftcli.model.loss import SUPERVISED, forward_loss, next_tokens, target_positions
from ftcli.train.build import build_loop
from ftcli.train.loop import Objective, StepMonitor, TrainerHooks, TrainingLoop
from ftcli.train.parallel import MicroBatch, TokenCounts
from ftcli.train.state import draw_of_epoch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup


class SftObjective(Objective):
    """Cross-entropy over the supervised tokens of a step, whatever micro-batches and ranks it is split into.

    Args:
        epochs: What an epoch holds, and in which order.
        stack: The decoder layers as one function, where all are on the kernels.
        sequence: This rank's part of each row, where ranks share rows.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        *,
        group: RankGroup | None,
        stack: DecoderStack | None,
        sequence: SequencePart | None,
    ) -> None:
        train = job.recipe.train
        parts = 1 if sequence is None else sequence.parts
        self._model, self._epochs, self._stack, self._sequence = model, epochs, stack, sequence
        self._device, self._plan = job.device, job.plan
        self._collate = EpochCollator(epochs, job.pad_token_id, job.batches(model))
        self._vocab_size = head_of(model).weight.shape[0]
        self._alone = group is None
        self._rank, self._ranks = (0, 1) if group is None else (group.rank // parts, group.size // parts)
        self._size, self._accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
        self._turns = len(self.order(0))
        self._epoch, self._order = 0, self.order(0)
        self.steps_per_epoch = -(-self._turns // self._accumulation)

    def order(self, epoch: int) -> list[list[int]]:
        """The sequences of each of this rank's micro-batches of an epoch."""
        return self._epochs.batches(epoch, self._size, self._rank, self._ranks)

    def row_origins(self, row: int) -> Sequence[Origin]:
        """The rows of data files that a sequence holds."""
        return [tokens.row.origin for tokens in self._epochs.members(row)]

    def epochs_done(self, step: int) -> float:
        """How often all data has been seen after so many steps."""
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
        return [self._micro_batch(units) for units in self._order[first : first + self._accumulation]]

    def _micro_batch(self, units: Sequence[int]) -> MicroBatch:
        """The batch of these sequences, or this rank's part of it, with the positions that bear loss, for which the
        loss would have to wait for the device. The sequence after the last one stands for a batch without labels.
        """
        blank = units[0] == self._epochs.units
        batch = self._collate([0] if blank else units)
        if blank:
            batch["labels"].fill_(IGNORE_INDEX)
        if self._sequence is not None:
            batch = part_of(batch, self._sequence.part, self._sequence.parts)
        targets = batch["targets"].reshape(-1) if "targets" in batch else next_tokens(batch["labels"])
        supervised = target_positions(targets, self._vocab_size)
        # Padded rows come with a mask, others with their lengths. The sum of either is the number of tokens.
        real = batch["attention_mask"] if "attention_mask" in batch else batch["lengths"]
        counts = TokenCounts(supervised.numel(), 0 if blank else int(real.sum()), batch["input_ids"].numel())
        inputs = {name: value for name, value in batch.items() if name != "lengths"}
        return MicroBatch({**inputs, SUPERVISED: supervised}, () if blank else tuple(units), counts)

    def loss(self, inputs: dict[str, Tensor], supervised: Tensor) -> Tensor:
        """Summed loss in nats over the supervised tokens, divided by those of the whole step."""
        with compute_context(self._device, self._plan.compute, self._plan.autocast):
            found = forward_loss(self._model, inputs, num_items=supervised, stack=self._stack, sequence=self._sequence)
        return found.loss


def build_sft(
    job: Job,
    model: PreTrainedModel | PeftModel,
    data: Epochs | Sequence[TokenizedRow],
    hooks: TrainerHooks,
    group: RankGroup | None = None,
) -> TrainingLoop:
    """The loop that trains ``model`` on tokenized ``data``.

    Args:
        data: What an epoch holds, and in which order; or rows, of which an epoch holds each once.
        group: As :func:`ftcli.train.build.build_loop`.
    """
    epochs = data if isinstance(data, Epochs) else plain_epochs(data, job.recipe.run.seed)

    def objective(stack: DecoderStack | None, sequence: SequencePart | None) -> SftObjective:
        return SftObjective(job, model, epochs, group=group, stack=stack, sequence=sequence)

    return build_loop(job, model, objective, hooks, group)
