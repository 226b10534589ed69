"""The objective of labelled answers: their mean loss in a step, against a reference, with the KL of the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.kto.losses import LABEL_SUMS, LabelledAnswers, LabelLoss, label_sums, measures, step_sums
from ftcli.methods.kto.reference import known_of, mismatched_rows, units_of_step
from ftcli.methods.preference.objective import KNOWN, ComparedObjective, without_dropout
from ftcli.methods.preference.pairs import SCORED
from ftcli.methods.preference.reference import Reference
from ftcli.model.backbone import compute_context
from ftcli.plain import JsonObject
from ftcli.plan.memory.terms import FORWARD
from ftcli.run.metrics import MetricsLine
from ftcli.train.checkpoint_state import Progress
from ftcli.train.loop import StepMonitor
from ftcli.train.on_rows import ObjectiveParts
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job

#: The label of each answer of a micro-batch, (N,); 0 in one that stands for none.
_LABELS = "answer_labels"


class LabelObjective(ComparedObjective):
    """The mean loss of a step's answers, whatever micro-batches and ranks it is split into."""

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        loss: LabelLoss,
        *,
        reference: Reference | None,
        **parts: Unpack[ObjectiveParts],
    ) -> None:
        compared = reference or Reference()
        self._loss, self._known, self._longest = loss, compared.of_rows or {}, job.recipe.data.max_seq_len
        super().__init__(
            job,
            model,
            epochs,
            ("label_sums", LABEL_SUMS),
            ld_alpha=1.0,
            reference=compared.model,
            known=compared.of_rows is not None,
            other=compared.other,
            **parts,
        )
        self._kl = torch.tensor(0.0, device=job.device)
        self._whole_order: tuple[int, list[int]] | None = None

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
        documents = self.documents(units)
        inputs = self._scorer.batch(documents)
        inputs[_LABELS] = labels = torch.tensor([0.0 if blank else document.value for document in documents])
        if self._is_known:
            inputs[KNOWN] = torch.zeros(len(documents), 1) if blank else known_of(self._known, documents)
        wanted = int((inputs[SCORED][labels > 0] > 0).sum())
        real = sum(len(document.input_ids) for document in documents)
        counts = TokenCounts(wanted, real, inputs["input_ids"].numel(), len(documents))
        return self.counted_batch(inputs, units, counts, blank=blank)

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the answers over those of the whole step; with ``sft_weight`` times the cross-entropy of
        the wanted answers' tokens over these."""
        labels = inputs.pop(_LABELS)
        policy, reference, tokens = self.compared(inputs)
        assert reference is not None
        answers = LabelledAnswers(policy.sums - reference.sums, labels, self._kl)
        loss = self._loss.values(answers).sum() / step.pairs
        if self._loss.sft_weight:
            loss = loss - self._loss.sft_weight * (policy.sums * (labels > 0)).sum() / step.supervised
        return self.noted(loss, label_sums(answers, policy.sums, tokens, self._loss.beta))

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
        """The answers' summed gain over the reference."""
        inputs = {name: value.to(self._device) for name, value in self._scorer.batch(documents).items()}
        computing = compute_context(self._device, self._dtypes.compute, self._dtypes.autocast)
        with without_dropout(self._modules), computing:
            policy = self._scorer.score(self._model, inputs)
        known = known_of(self._known, documents).to(self._device) if self._is_known else None
        return (policy.sums - self._of_reference(inputs, known).sums).double().sum()

    # -- metrics and checkpoints -----------------------------------------------------------------------------

    def reduced(self) -> None:
        """All-reduces the metrics of all ranks' micro-batches, in the order of one process, and those of the step."""
        super().reduced()
        self._sums.add_once(step_sums(self._kl))

    def metrics(self) -> MetricsLine:
        """Means over the answers, and the steps, since the last line."""
        return measures(self._sums.take(), kl=self._loss.estimates_kl)

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """The same; runs that do not say how they began have computed the reference in each step."""
        super().restore({"reference": "live", **state}, progress)
