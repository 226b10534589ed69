"""What labelled answers teach: their mean loss in a step, against a reference, with the KL of the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.kto.losses import LabelledAnswers, LabelLoss
from ftcli.methods.kto.mismatched import mismatched_rows
from ftcli.methods.kto.reference import LabelReference, known_of, units_of_step
from ftcli.methods.kto.sums import SUMS, LabelSums, measures
from ftcli.methods.preference.first_step import require_equal, without_dropout
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.methods.preference.reference import goes_on_live
from ftcli.model.backbone import compute_context, head_of
from ftcli.plain import JsonObject
from ftcli.plan.memory.terms import FORWARD
from ftcli.run.metrics import MetricsLine
from ftcli.train.build import build_loop
from ftcli.train.checkpoint_state import Progress
from ftcli.train.epochs import EpochObjective
from ftcli.train.loop import StepMonitor, TrainerHooks, TrainingLoop
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts
from ftcli.train.reference import of_reference
from ftcli.train.sums import StepSums

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup

#: The label of each answer of a micro-batch, (N,); 0 in one that stands for none.
_LABELS = "answer_labels"
#: What the reference gives the answers of a micro-batch, (N,); absent where it is computed.
_KNOWN = "reference"


class LabelObjective(EpochObjective):
    """The mean loss of a step's answers, whatever micro-batches and ranks it is split into.

    Args:
        model: What learns, on the kernels or not.
        reference: What is compared with; without a second model and known log-probabilities the model without its
            adapters.
        stack: The decoder layers as one function, where all are on the kernels.
        sequence: This rank's part of each row, where ranks share rows: each of them computes the loss of the whole
            answers, and the first one counts it.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        loss: LabelLoss,
        *,
        group: RankGroup | None,
        stack: DecoderStack | None,
        reference: LabelReference | None,
        sequence: SequencePart | None = None,
    ) -> None:
        super().__init__(job, epochs, group, 1 if sequence is None else sequence.parts)
        self._model, self._stack, self._loss, self._group = model, stack, loss, group
        self._reference, self._known = (None, None) if reference is None else (reference.model, reference.known)
        self._reporter = job.reporter
        self._device, self._dtypes, self._longest = job.device, job.dtypes, job.recipe.data.max_seq_len
        self._counts = sequence is None or sequence.part == 0
        vocabulary = head_of(model).weight.shape[0]
        self._scorer = AnswerScorer(job.batches(model), job.pad_token_id, vocabulary, 1.0, sequence)
        self._kl = torch.tensor(0.0, device=job.device)
        self._sums = StepSums("label_sums", SUMS, job.device, group)
        self._whole_order: tuple[int, list[int]] | None = None
        self._checked = False

    # -- a step ----------------------------------------------------------------------------------------------

    def micro_batches(self, step: int, monitor: StepMonitor) -> list[MicroBatch]:
        """This rank's micro-batches. The KL of the step is estimated first: all of its answers are compared with it."""
        found = super().micro_batches(step, monitor)
        if self._loss.estimates_kl:
            monitor.enter(FORWARD)
            with nullcontext() if self._group is None else self._group.exchanging():
                self._kl = self.estimated_kl(self.rows_of_step(step))
            monitor.enter("step")
        return found

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The answers of these rows."""
        documents = [tokens for unit in units for tokens in self._epochs.members(unit)]
        inputs = self._scorer.batch(documents)
        labels = torch.tensor([0.0 if blank else document.value for document in documents])
        inputs[_LABELS] = labels
        if self._known is not None:
            inputs[_KNOWN] = torch.zeros(len(documents)) if blank else known_of(self._known, documents)
        computed = inputs["input_ids"].numel()
        rows = () if blank else tuple(units)
        if blank or not self._counts:
            return MicroBatch(inputs, rows, TokenCounts(computed=computed))
        wanted = int((inputs[SCORED][labels > 0] > 0).sum())
        real = sum(len(document.input_ids) for document in documents)
        return MicroBatch(inputs, rows, TokenCounts(wanted, real, computed, len(documents)))

    def begin(self, step: int) -> None:
        """Notes the sums so far."""
        self._sums.begin()

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the answers over those of the whole step; with ``sft_weight`` times the cross-entropy of
        the wanted answers' tokens over these."""
        labels, known = inputs.pop(_LABELS), inputs.pop(_KNOWN, None)
        reference = self._of_reference(inputs, known)
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            policy = self._scorer.score(self._model, inputs, self._stack)
        tokens = (inputs[SCORED] > 0).sum(1).float()
        if not self._checked:
            self._checked = True
            require_equal(self._model, self._dtypes, self._scorer, inputs, policy, reference, self._group)
        answers = LabelledAnswers(policy.sums - reference.sums, labels, self._kl)
        loss = self._loss.values(answers).sum() / step.pairs
        if self._loss.sft_weight:
            loss = loss - self._loss.sft_weight * (policy.sums * (labels > 0)).sum() / step.supervised
        sums = LabelSums.of(answers, policy.sums, tokens, self._loss.beta).vector()
        self._sums.add(sums if self._counts else torch.zeros_like(sums))
        return loss if self._counts else loss - loss.detach()

    # -- the reference, and the KL ---------------------------------------------------------------------------

    def rows_of_step(self, step: int) -> list[TokenizedRow]:
        """The rows of all ranks' micro-batches in this step, in the order of :func:`units_of_step`."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._whole_order is None or self._whole_order[0] != epoch:
            self._whole_order = epoch, self._epochs.order(epoch)
        size = self._size * self._accumulation * self._ranks
        units = units_of_step(self._whole_order[1], index, size)
        return [row for unit in units for row in self._epochs.members(unit)]

    @torch.no_grad()
    def estimated_kl(self, rows: Sequence[TokenizedRow]) -> Tensor:
        """z: the mean of what mismatched answers have gained over the reference, 0 where they have lost; a float32
        scalar. The ranks share the mismatched rows, and add them up in the order of one process. All make as many
        passes, since they may hold shards of the weights: one that has no rows left takes the last ones once more.
        """
        made = mismatched_rows(rows, self._longest, self._loss.kl_rows)
        batches = [made[start : start + self._size] for start in range(0, len(made), self._size)]
        sums = torch.zeros(max(len(batches), 1), dtype=torch.float64, device=self._device)
        for turn in range(0, len(batches), self._ranks):
            number = turn + self._rank
            gained = self._gained(batches[min(number, len(batches) - 1)])
            if number < len(batches) and self._counts:
                sums[number] = gained
        if self._group is not None:
            self._group.agree("KL estimated")
            self._group.all_reduce([sums])
        total = sums[0]
        for one in sums[1:]:
            total = total + one
        return torch.relu(total / max(len(made), 1)).float()

    def _gained(self, documents: Sequence[TokenizedRow]) -> Tensor:
        """What the answers have gained over the reference, in all."""
        inputs = {name: value.to(self._device) for name, value in self._scorer.batch(documents).items()}
        computing = compute_context(self._device, self._dtypes.compute, self._dtypes.autocast)
        with without_dropout(self._model), computing:
            policy = self._scorer.score(self._model, inputs)
        known = None if self._known is None else known_of(self._known, documents).to(self._device)
        return (policy.sums - self._of_reference(inputs, known).sums).double().sum()

    @torch.no_grad()
    def _of_reference(self, inputs: dict[str, Tensor], known: Tensor | None = None) -> ScoredAnswers:
        if known is not None:
            return ScoredAnswers(known, known)
        model = self._model if self._reference is None else self._reference
        computing = compute_context(self._device, self._dtypes.compute, self._dtypes.autocast)
        with without_dropout(model), of_reference(self._reference, self._model), computing:
            return self._scorer.score(model, inputs)

    # -- metrics and checkpoints -----------------------------------------------------------------------------

    def reduced(self) -> None:
        """Adds up the metrics of all ranks' micro-batches, in the order of one process, and those of the step."""
        self._sums.reduce()
        self._sums.add_once(LabelSums.of_step(self._kl).vector())

    def undo(self, step: int) -> None:
        """Restores the sums that :meth:`begin` has noted."""
        self._sums.undo()

    def metrics(self) -> MetricsLine:
        """Means over the answers, and the steps, since the last line."""
        return measures(self._sums.take(), kl=self._loss.estimates_kl)

    def state(self) -> JsonObject:
        """The sums of a half-filled line, and whether the reference was scored ahead."""
        return {**self._sums.state(), "reference": "live" if self._known is None else "ahead"}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with these sums; what was checked before the first step is not checked again. A reference that was
        computed in each step stays so, as it was in runs that do not say.
        """
        self._checked = progress.step > 0
        can_compute = self._reference is not None or hasattr(self._model, "disable_adapter")
        known, began = self._known is not None, state.get("reference", "live")
        if goes_on_live(began, self._reporter, known=known, can_compute=can_compute):
            self._known = None
        self._sums.restore(state)


def build_labelled(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    hooks: TrainerHooks,
    group: RankGroup | None = None,
    reference: LabelReference | None = None,
) -> TrainingLoop:
    """The loop that trains ``model`` on labelled answers (:func:`ftcli.methods.kto.order.labelled_epochs`)."""
    loss = LabelLoss.of(job.recipe.preference)

    def objective(stack: DecoderStack | None, sequence: SequencePart | None) -> LabelObjective:
        return LabelObjective(
            job, model, epochs, loss, group=group, stack=stack, reference=reference, sequence=sequence
        )

    return build_loop(job, model, objective, hooks, group)
