"""The objective of pairs: the mean loss of the pairs of a step, against a reference that is computed beside it.

Before a run's first step policy and reference are one model, which is checked, unless the reference is another one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from ftcli.data.order import Epochs
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.methods.preference.figures import PAIR_SUMS, measures, pair_sums
from ftcli.methods.preference.losses import Answers, PairLoss
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.methods.preference.reference import Reference, by_answer, goes_on_live
from ftcli.model.backbone import compute_context, head_of
from ftcli.model.initial_adapters import AdapterSwitch
from ftcli.model.quantized import has_coarse_products
from ftcli.plain import JsonObject
from ftcli.run.metrics import MetricsLine
from ftcli.train.checkpoint_state import Progress
from ftcli.train.epochs import SummedObjective
from ftcli.train.on_rows import ObjectiveParts
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts, float_bits, float_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.plan.precision import DtypePlan
    from ftcli.reporting import Reporter
    from ftcli.run.process_group import RankGroup

#: Weight of each pair of a micro-batch, (P,); 0 in one that stands for none.
_PAIRS = "pairs"
#: What the reference gives the answers of a micro-batch; absent where it is computed. Of pairs (2 P, 2): sums and
#: weighed ones; of labelled answers (N, 1): sums.
KNOWN = "reference"
#: Nats a token by which policy and reference may differ before the first step, by the dtype of the products: the two
#: are computed by other code. Roundings of single tokens are larger and of either sign (0.06 in a Mistral-7B in
#: bfloat16, 0.3 in a Llama-3.1-8B in fp8; :mod:`ftcli.methods.grpo.policy`): n tokens count as at least 15 sqrt n.
_ALLOWED = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
_ALLOWED_COARSE, _ROUNDED = 0.1, 15.0
#: Nats a token by which another model is worse than a guess if it does not know what it is asked; random weights, which
#: know nothing, are within a few tenths.
_WORSE_THAN_A_GUESS = 1.0


class ComparedObjective(SummedObjective):
    """An objective over answers that are compared with a reference.

    Args:
        reference: A second model; None: where nothing is known the model without its adapters.
        known: Whether the reference was scored ahead of the first step.
        other: The name of the reference where it is another model.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        sums: tuple[str, int],
        *,
        ld_alpha: float,
        reference: PreTrainedModel | None,
        known: bool,
        other: str | None,
        **parts: Unpack[ObjectiveParts],
    ) -> None:
        super().__init__(job, model, epochs, *sums, **parts)
        self._reference, self._is_known, self._other, self._reporter = reference, known, other, job.reporter
        self._vocabulary = size = head_of(model).weight.shape[0]
        self._scorer = AnswerScorer(
            job.batches(model), job.pad_token_id, size, ld_alpha, parts["sequence"], self._pixels
        )
        self._checked = False
        self._modules = list(model.modules())
        adapted = reference is None and hasattr(model, "disable_adapter")
        self._adapters = AdapterSwitch(model) if adapted else None

    def compared(
        self, inputs: dict[str, Tensor], *, aligned: bool = False, alone: bool = False
    ) -> tuple[ScoredAnswers, ScoredAnswers | None, Tensor]:
        """Log-probabilities of a batch's answers under policy and reference (``alone``: there is none), and their
        tokens.

        Before the first step the two are compared, or where the reference is another model, the policy with its own
        start, the model without its adapters; and how far apart they are is told. Raises FtcliError FT714 (exit 1).
        """
        known, other = inputs.pop(KNOWN, None), None if self._checked else self._other
        reference = None if alone else self._of_reference(inputs, known)
        adapted = other is not None and hasattr(self._model, "disable_adapter")
        held = self._of_reference(inputs) if adapted else reference if other is None else None  # before the policy is
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            policy = self._scorer.score(self._model, inputs, self._stack, aligned=aligned)
        if reference is not None and not self._checked:
            self._checked = True
            if other is not None:
                tell_start(other, inputs, policy, reference, self._vocabulary, self._reporter)
            if held is not None:
                require_equal(self._model, self._dtypes, self._scorer, inputs, policy, held, self._group)
        return policy, reference, (inputs[SCORED] > 0).sum(1).float()

    @torch.no_grad()
    def _of_reference(self, inputs: dict[str, Tensor], known: Tensor | None = None) -> ScoredAnswers:
        """The reference's log-probabilities of a batch's answers, computed where they are not ``known``."""
        if known is not None:
            return ScoredAnswers(known[:, 0], known[:, -1])
        computing = compute_context(self._device, self._dtypes.compute, self._dtypes.autocast)
        if self._reference is not None:  # it is in evaluation mode
            with computing:
                return self._scorer.score(self._reference, inputs)
        assert self._adapters is not None, "a model that is trained whole has a second one, or was scored ahead"
        with without_dropout(self._modules), self._adapters.off(), computing:
            return self._scorer.score(self._model, inputs)

    def state(self) -> JsonObject:
        """The sums of a half-filled line, and whether the reference was scored ahead."""
        return {**super().state(), "reference": "ahead" if self._is_known else "live"}

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with these sums; what was checked before the first step is not checked again. A reference that was
        computed in each step stays so.
        """
        super().restore(state, progress)
        self._checked = self._checked or progress.step > 0
        can_compute = self._reference is not None or hasattr(self._model, "disable_adapter")
        can_compute = can_compute and self._other is None
        if goes_on_live(state.get("reference"), self._reporter, known=self._is_known, can_compute=can_compute):
            self._is_known = False


class PairObjective(ComparedObjective):
    """The mean loss of a step's pairs, whatever micro-batches and ranks it is split into."""

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        loss: PairLoss,
        *,
        reference: Reference | None,
        **parts: Unpack[ObjectiveParts],
    ) -> None:
        compared = reference or Reference()
        self._loss, self._of_units = loss, compared.of_units
        super().__init__(
            job,
            model,
            epochs,
            ("pair_sums", PAIR_SUMS),
            ld_alpha=loss.ld_alpha,
            reference=compared.model,
            known=compared.of_units is not None,
            other=compared.other,
            **parts,
        )
        self._checked = not loss.reference

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The pairs' answers in turn, chosen and rejected."""
        documents = self.documents(units)
        inputs = self._scorer.batch(documents)
        inputs[_PAIRS] = torch.zeros(len(units)) if blank else torch.ones(len(units))
        if self._is_known:
            assert self._of_units is not None
            known = by_answer(self._of_units[list(units)])
            inputs[KNOWN] = torch.zeros_like(known) if blank else known
        chosen, real = int((inputs[SCORED][0::2] > 0).sum()), self._scorer.tokens(documents)
        counts = TokenCounts(chosen, real, inputs["input_ids"].numel(), len(units))
        return self.counted_batch(inputs, units, counts, blank=blank)

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the pairs over those of the whole step; with ``sft_weight`` times the cross-entropy of the
        chosen answers' tokens over these."""
        weights, alone = inputs.pop(_PAIRS), not self._loss.reference
        policy, reference, tokens = self.compared(inputs, aligned=self._loss.weighs, alone=alone)
        answers = answers_of(policy, reference, tokens)
        loss = (self._loss.weighed_values(answers, policy.aligned) * weights).sum() / step.pairs
        if self._loss.sft_weight:
            loss = loss - self._loss.sft_weight * (policy.sums[0::2] * weights).sum() / step.supervised
        return self.noted(loss, pair_sums(answers, self._loss, weights))

    def metrics(self) -> MetricsLine:
        """Means over the pairs since the last line."""
        return {**measures(self._sums.take(), compared=self._loss.reference), **super().metrics()}


def answers_of(policy: ScoredAnswers, reference: ScoredAnswers | None, tokens: Tensor) -> Answers:
    """Chosen and rejected answers apart. ``tokens`` (2 P,): how many each has."""
    zeros = torch.zeros_like(policy.weighed)
    compared = zeros if reference is None else reference.weighed
    return Answers(
        policy.weighed[0::2], policy.weighed[1::2], compared[0::2], compared[1::2], tokens[0::2], tokens[1::2]
    )


@torch.no_grad()
def require_equal(
    model: PreTrainedModel | PeftModel,
    dtypes: DtypePlan,
    scorer: AnswerScorer,
    inputs: dict[str, Tensor],
    policy: ScoredAnswers,
    reference: ScoredAnswers,
    group: RankGroup | None = None,
) -> None:
    """Before the first step the model is its reference, but for dropout and rounding; of one that is compared with
    another model, ``reference`` is itself without its adapters. Raises FtcliError FT714 (exit 1); what is not finite is
    left to FT702.

    Args:
        scorer, inputs: What policy and reference were scored with; the policy is once more, without dropout, where they
            differ.
        group: All of its ranks call this: where weights are sharded or rows are shared, no rank can score on its own.
    """
    allowed = _ALLOWED_COARSE if has_coarse_products(model) else _ALLOWED[dtypes.compute]
    tokens = (inputs[SCORED] > 0).sum(1).float()
    found = _largest(_difference(policy, reference, tokens), group)
    if found > allowed:
        with without_dropout(list(model.modules())), compute_context(tokens.device, dtypes.compute, dtypes.autocast):
            # Layer by layer: a stack would write over what the policy's backward pass reads.
            again = scorer.score(model, inputs)
        found = _largest(_difference(again, reference, tokens), group)
    if found > allowed:
        raise FtcliError.single(
            "FT714",
            f"before the first step policy and reference differ by {found:.2g} nats a token: the run would begin "
            "with another reference than its own start",
            exit_code=ExitCode.BUG,
            help="train with model.kernels: off, and report this with the run's manifest.json",
        )


def tell_start(
    name: str,
    inputs: dict[str, Tensor],
    policy: ScoredAnswers,
    reference: ScoredAnswers,
    vocabulary: int,
    reporter: Reporter,
) -> None:
    """Before the first step: what another model gives the first answers, and what the trained one does, from which the
    loss begins. FT715, a warning, where the reference is worse than a guess.
    """
    tokens = float((inputs[SCORED] > 0).sum())
    theirs, ours = (float(scored.sums.detach().double().sum()) / max(tokens, 1.0) for scored in (reference, policy))
    reporter.info(
        f"reference: {name} gives the first answers {theirs:.4f} nats a token, and the model that is trained "
        f"{ours:.4f}: the loss begins at its value of these two, not at that of equal models"
    )
    if theirs < -math.log(vocabulary) - _WORSE_THAN_A_GUESS:
        message = f"{name} gives the first answers {theirs:.2f} nats a token, less than a guess among {vocabulary:,}"
        help = "look whether it was trained on rows of this form: chat template, language and tokenizer"
        reporter.finding(Finding("FT715", message, help=help, severity="warning"))


@contextmanager
def without_dropout(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A block in which none of a model's modules drops anything.

    `model.eval()` and `model.train()` take much longer for the thousands of an 8B with adapters: they walk through
    them, and look at each attribute that is set.
    """
    training = [module for module in modules if module.training]
    for module in training:
        object.__setattr__(module, "training", False)
    try:
        yield
    finally:
        for module in training:
            object.__setattr__(module, "training", True)


def _largest(difference: float, group: RankGroup | None) -> float:
    """That of the rank with the largest."""
    if group is None:
        return difference
    return max(float_of(row[0]) for row in group.agree("compared", [float_bits(difference)]))


def _difference(one: ScoredAnswers, other: ScoredAnswers, tokens: Tensor) -> float:
    """The mean over answers, in nats a token; of short ones in nats for 15 sqrt n tokens."""
    return float(((one.sums.detach() - other.sums).abs() / torch.maximum(tokens, _ROUNDED * tokens.sqrt())).mean())
