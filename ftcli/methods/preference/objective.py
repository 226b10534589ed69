"""What pairs teach: the mean loss of the pairs of a step, against a reference that is computed beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.methods.preference.ahead import by_answer
from ftcli.methods.preference.first_step import require_equal, without_dropout
from ftcli.methods.preference.losses import Answers, PairLoss
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.methods.preference.reference import Reference, goes_on_live
from ftcli.model.backbone import compute_context, head_of
from ftcli.plain import JsonObject
from ftcli.run.metrics import MetricsLine
from ftcli.train.build import build_loop
from ftcli.train.checkpoint_state import Progress
from ftcli.train.epochs import EpochObjective
from ftcli.train.loop import TrainerHooks, TrainingLoop
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

#: Weight of each pair of a micro-batch, (P,); 0 in one that stands for none.
_PAIRS = "pairs"
#: What the reference gives the answers of a micro-batch, (2 P, 2): sums and weighed ones; absent where it is computed.
_KNOWN = "reference"


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over pairs, in float64: what metrics are means of.

    Attributes:
        chosen_reward, rejected_reward: beta times what the log-probability has gained over the reference.
        right: Pairs whose chosen answer has the larger reward; a tie is one half.
        fell: Pairs whose chosen answer has become less likely than under the reference.
        alike, alike_right: Pairs whose answers differ by 10% in length at most, and those of them that are right.
    """

    pairs: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    right: Tensor
    fell: Tensor
    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    alike: Tensor
    alike_right: Tensor

    @classmethod
    def of(cls, answers: Answers, loss: PairLoss, weights: Tensor) -> PairSums:
        """Of a batch; ``weights`` (P,) are 0 for pairs that do not count."""
        one, other = answers.chosen_ratio, answers.rejected_ratio
        if loss.averaged:
            one, other = one / answers.chosen_tokens, other / answers.rejected_tokens
        right = (one > other).float() + 0.5 * (one == other).float()
        shorter = torch.minimum(answers.chosen_tokens, answers.rejected_tokens)
        alike = ((answers.chosen_tokens - answers.rejected_tokens).abs() <= 0.1 * shorter).float()
        each = (
            torch.ones_like(one), loss.beta * one, loss.beta * other, right, (one < 0).float(),
            answers.chosen, answers.rejected, answers.chosen_tokens, answers.rejected_tokens, alike, alike * right,
        )  # fmt: skip
        return cls(*((value.detach() * weights).double().sum() for value in each))

    def vector(self) -> Tensor:
        """All of them, (11,)."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


#: How many numbers :class:`PairSums` has.
SUMS = len(fields(PairSums))


def measures(sums: Sequence[float], *, compared: bool) -> dict[str, float]:
    """Means by name, of :meth:`PairSums.vector`; ``compared``: there is a reference, than which answers can fall."""
    pairs, chosen, rejected, right, fell, chosen_logp, rejected_logp, ours, others, alike, alike_right = sums
    if not pairs:
        return {}
    return {
        "rewards/chosen": chosen / pairs,
        "rewards/rejected": rejected / pairs,
        "rewards/margins": (chosen - rejected) / pairs,
        "rewards/accuracies": right / pairs,
        "logps/chosen": chosen_logp / max(ours, 1.0),
        "logps/rejected": rejected_logp / max(others, 1.0),
        **({"chosen_fell": fell / pairs} if compared else {}),
        **({"rewards/accuracies_alike": alike_right / alike} if alike else {}),
    }


def answers_of(policy: ScoredAnswers, reference: ScoredAnswers | None, tokens: Tensor) -> Answers:
    """Chosen and rejected answers apart. ``tokens`` (2 P,): how many each has."""
    zeros = torch.zeros_like(policy.weighed)
    compared = zeros if reference is None else reference.weighed
    return Answers(
        policy.weighed[0::2], policy.weighed[1::2], compared[0::2], compared[1::2], tokens[0::2], tokens[1::2]
    )


def margins_of(answers: Answers, loss: PairLoss) -> Tensor:
    """The margin of each pair, (P,) float64: of ``rewards/margins`` the mean is logged."""
    one, other = answers.chosen_ratio, answers.rejected_ratio
    if loss.averaged:
        one, other = one / answers.chosen_tokens, other / answers.rejected_tokens
    return loss.beta * (one.double() - other.double())


class PairObjective(EpochObjective):
    """The mean loss of a step's pairs, whatever micro-batches and ranks it is split into.

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
        loss: PairLoss,
        *,
        group: RankGroup | None,
        stack: DecoderStack | None,
        reference: Reference | None,
        sequence: SequencePart | None = None,
    ) -> None:
        super().__init__(job, epochs, group, 1 if sequence is None else sequence.parts)
        self._model, self._stack, self._loss, self._group = model, stack, loss, group
        self._reference, self._known = (None, None) if reference is None else (reference.model, reference.of_units)
        self._reporter = job.reporter
        self._device, self._dtypes = job.device, job.dtypes
        self._counts = sequence is None or sequence.part == 0
        vocabulary = head_of(model).weight.shape[0]
        self._scorer = AnswerScorer(job.batches(model), job.pad_token_id, vocabulary, loss.ld_alpha, sequence)
        self._sums = StepSums("pair_sums", SUMS, job.device, group)
        self._checked = not loss.reference

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The pairs' answers in turn, chosen and rejected."""
        documents = [tokens for unit in units for tokens in self._epochs.members(unit)]
        inputs = self._scorer.batch(documents)
        inputs[_PAIRS] = torch.zeros(len(units)) if blank else torch.ones(len(units))
        if self._known is not None:
            known = by_answer(self._known[list(units)])
            inputs[_KNOWN] = torch.zeros_like(known) if blank else known
        rows = () if blank else tuple(units)
        if blank or not self._counts:
            return MicroBatch(inputs, rows, TokenCounts(computed=inputs["input_ids"].numel()))
        chosen = int((inputs[SCORED][0::2] > 0).sum())
        real = self._scorer.tokens(documents)
        return MicroBatch(inputs, rows, TokenCounts(chosen, real, inputs["input_ids"].numel(), len(units)))

    def begin(self, step: int) -> None:
        """Notes the sums so far."""
        self._sums.begin()

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the pairs over those of the whole step; with ``sft_weight`` times the cross-entropy of the
        chosen answers' tokens over these."""
        weights, known = inputs.pop(_PAIRS), inputs.pop(_KNOWN, None)
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            reference = self._of_reference(inputs, known) if self._loss.reference else None
            policy = self._scorer.score(self._model, inputs, self._stack, aligned=self._loss.weighs)
        tokens = (inputs[SCORED] > 0).sum(1).float()
        if not self._checked and reference is not None:
            self._checked = True
            require_equal(self._model, self._dtypes, self._scorer, inputs, policy, reference, self._group)
        answers = answers_of(policy, reference, tokens)
        loss = (self._loss.weighed_values(answers, policy.aligned) * weights).sum() / step.pairs
        if self._loss.sft_weight:
            loss = loss - self._loss.sft_weight * (policy.sums[0::2] * weights).sum() / step.supervised
        sums = PairSums.of(answers, self._loss, weights).vector()
        self._sums.add(sums if self._counts else torch.zeros_like(sums))
        return loss if self._counts else loss - loss.detach()

    @property
    def _can_compute(self) -> bool:
        """Whether the reference can be computed while the model is trained."""
        return self._reference is not None or hasattr(self._model, "disable_adapter")

    @torch.no_grad()
    def _of_reference(self, inputs: dict[str, Tensor], known: Tensor | None = None) -> ScoredAnswers:
        if known is not None:
            return ScoredAnswers(known[:, 0], known[:, 1])
        model = self._model if self._reference is None else self._reference
        with without_dropout(model), of_reference(self._reference, self._model):
            return self._scorer.score(model, inputs)

    def reduced(self) -> None:
        """Adds up the metrics of all ranks' micro-batches, in the order of one process."""
        self._sums.reduce()

    def undo(self, step: int) -> None:
        """Restores the sums that :meth:`begin` has noted."""
        self._sums.undo()

    def metrics(self) -> MetricsLine:
        """Means over the pairs since the last line."""
        return measures(self._sums.take(), compared=self._loss.reference)

    def state(self) -> JsonObject:
        """The sums of a half-filled line, and whether the reference was scored ahead."""
        return {**self._sums.state(), "reference": "live" if self._known is None else "ahead"}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with these sums; what was checked before the first step is not checked again. A reference that was
        computed in each step stays so.
        """
        self._checked = self._checked or progress.step > 0
        known, began = self._known is not None, state.get("reference")
        if goes_on_live(began, self._reporter, known=known, can_compute=self._can_compute):
            self._known = None
        self._sums.restore(state)


def build_pairs(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    hooks: TrainerHooks,
    group: RankGroup | None = None,
    reference: Reference | None = None,
) -> TrainingLoop:
    """The loop that trains ``model`` on pairs (:func:`ftcli.methods.preference.pairs.pair_epochs`)."""
    recipe = job.recipe
    loss = PairLoss.of(recipe.train.method, recipe.preference)

    def objective(stack: DecoderStack | None, sequence: SequencePart | None) -> PairObjective:
        return PairObjective(job, model, epochs, loss, group=group, stack=stack, reference=reference, sequence=sequence)

    return build_loop(job, model, objective, hooks, group)
