"""What supervised fine-tuning learns from: rows in the order of each epoch, and the mean loss of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ftcli.data.collate import EpochCollator
from ftcli.data.order import Epochs, plain_epochs
from ftcli.data.sequence_parallel import part_of
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import compute_context, head_of
from ftcli.model.loss import SUPERVISED, forward_loss, next_tokens, target_positions
from ftcli.train.build import build_loop
from ftcli.train.epochs import EpochObjective
from ftcli.train.loop import TrainerHooks, TrainingLoop
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup


class SftObjective(EpochObjective):
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
        super().__init__(job, epochs, group, 1 if sequence is None else sequence.parts)
        self._model, self._stack, self._sequence = model, stack, sequence
        self._device, self._dtypes = job.device, job.dtypes
        self._collate = EpochCollator(epochs, job.pad_token_id, job.batches(model))
        self._vocab_size = head_of(model).weight.shape[0]

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The batch of these sequences, or this rank's part of it, with the positions that bear loss, for which the
        loss would have to wait for the device.
        """
        batch = self._collate(units)
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

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """Summed loss in nats over the supervised tokens, divided by those of the whole step."""
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            found = forward_loss(
                self._model, inputs, num_items=step.supervised, stack=self._stack, sequence=self._sequence
            )
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
