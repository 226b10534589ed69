"""Held-out pairs: loss, accuracy, margin, and what became of the answers' log-probabilities and of their stop token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.evaluate.batching import Sums, in_batches, summed_in_step, summed_over_ranks
from ftcli.evaluate.loss import LossResult, require_finite
from ftcli.evaluate.margins import Floats, RowTable, margins_of_pairs
from ftcli.evaluate.suite import Evaluator
from ftcli.methods.preference.ahead import by_answer, by_unit
from ftcli.methods.preference.cache import unit_digest
from ftcli.methods.preference.figures import controlled, stop_columns, stop_measures
from ftcli.methods.preference.losses import PairLoss
from ftcli.methods.preference.objective import SUMS, PairSums, answers_of, margins_of, measures
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.model.backbone import compute_context, head_of, root_of
from ftcli.model.shards import reshard_model, try_forward
from ftcli.train.reference import of_reference

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.run.process_group import RankGroup

#: What held-out results call the numbers of metrics.
_NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/accuracies_alike": "accuracy_of_like_length",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "logps/chosen": "chosen_logp",
    "logps/rejected": "rejected_logp",
    "chosen_fell": "chosen_fell",
}
#: Loss, cross-entropy, and the sums over pairs.
_WIDTH = 2 + SUMS
#: Of each pair: its margin, the tokens of both answers, and what :func:`stop_columns` gives of the chosen one.
_COLUMNS = 5


@dataclass(frozen=True, slots=True)
class PairEvaluator(Evaluator):
    """Measures models on held-out pairs.

    Args:
        reference: A second model to compare with; None: the model without its adapters. Where there is neither, as in
            `ftcli eval` of a full fine-tune, it is the first model that is measured.
        known: What the reference gives each pair, by its digest. What is missing is computed once and added.
        stops: What it gives the last token of each chosen answer, likewise.
    """

    reference: PreTrainedModel | None = None
    known: dict[bytes, list[float]] = field(default_factory=dict, repr=False)
    stops: dict[bytes, float] = field(default_factory=dict, repr=False)

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> LossResult:
        """The mean loss of the pairs, in which chosen and rejected answers take turns, and ``more`` beside it."""
        return self._result([self._measured(model, sequences)], sequences)

    def losses(self, model: PreTrainedModel | PeftModel) -> tuple[LossResult | None, dict[str, LossResult]]:
        """Over all held-out files what one pass over all of them would give, and each file's."""
        files = self.by_dataset()
        found = {name: self._measured(model, rows) for name, rows in files.items()}
        all_rows = [row for rows in files.values() for row in rows]
        whole = self._result(list(found.values()), all_rows) if found else None
        return whole, {name: self._result([each], files[name]) for name, each in found.items()}

    def _result(self, parts: Sequence[tuple[Sums, Floats]], sequences: Sequence[TokenizedRow]) -> LossResult:
        """Of the pairs of all ``parts``, which are those of ``sequences``."""
        loss, columns = self._pair_loss(), np.concatenate([rows for _, rows in parts])
        total, cross_entropy, *of_pairs = (sum(each) for each in zip(*(sums for sums, _ in parts), strict=True))
        pairs, tokens = of_pairs[0], of_pairs[7] + of_pairs[8]
        mean = require_finite(total / max(pairs, 1) + loss.sft_weight * cross_entropy / max(of_pairs[7], 1))
        found = measures(of_pairs, compared=loss.reference)
        values, lengths = columns[:, 0], columns[:, 1:3]
        more = {ours: found[name] for name, ours in _NAMES.items() if name in found}
        more |= controlled(values, lengths) | stop_measures(columns[:, 3:])
        margins = margins_of_pairs(sequences, values, lengths, self.job.tokenizer)
        return LossResult(mean, None, None, int(tokens), int(pairs), more, margins)

    def _pair_loss(self) -> PairLoss:
        return PairLoss.of(self.job.recipe.train.method, self.job.recipe.preference)

    def _measured(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> tuple[Sums, Floats]:
        """Summed loss, summed cross-entropy of the chosen answers, and the sums of :class:`PairSums`; then, of each
        pair, the columns of :data:`_COLUMNS`.
        """
        job, loss = self.job, self._pair_loss()
        table = RowTable(len(sequences) // 2, _COLUMNS)
        vocabulary = head_of(model).weight.shape[0]
        scorer = AnswerScorer(job.batches(model), job.pad_token_id, vocabulary, loss.ld_alpha)

        def attempt(pairs: Sequence[int]) -> Sums | None:
            documents = [sequences[row] for pair in pairs for row in (2 * pair, 2 * pair + 1)]
            inputs = {name: value.to(job.device) for name, value in scorer.batch(documents).items()}
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                policy = forward_pass(model, scorer, inputs, aligned=loss.weighs, last=True)
                compared = self._compared(model, scorer, inputs, documents, policy) if loss.reference else None
            if policy is None or (loss.reference and compared is None):
                return None
            answers = answers_of(policy, compared, (inputs[SCORED] > 0).sum(1).float())
            weights = torch.ones(len(pairs), device=job.device)
            total = float(loss.weighed_values(answers, policy.aligned).double().sum())
            sft = -float(policy.sums[0::2].double().sum())
            assert policy.last is not None
            reference = None if compared is None or compared.last is None else compared.last[0::2]
            of_stops = stop_columns(documents[0::2], job.stops, policy.last[0::2], reference)
            table.fill(pairs, (margins_of(answers, loss), answers.chosen_tokens, answers.rejected_tokens, *of_stops))
            return (total, sft, *PairSums.of(answers, loss, weights).vector().tolist())

        def where(pair: int) -> Origin:
            return sequences[2 * pair].row.origin

        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                sums = summed(
                    self, range(len(sequences) // 2), attempt, where, width=_WIDTH, in_step=root_of(model) is not None
                )
        finally:
            model.train(was_training)
        reshard_model(model)
        return sums, table.gathered(self.group, job.recipe.eval.per_device_eval_batch_size)

    def _compared(
        self,
        model: PreTrainedModel | PeftModel,
        scorer: AnswerScorer,
        inputs: dict[str, torch.Tensor],
        documents: Sequence[TokenizedRow],
        policy: ScoredAnswers | None,
    ) -> ScoredAnswers | None:
        """What the reference gives; None where that did not fit into memory."""
        pairs = [unit_digest(*pair) for pair in zip(documents[0::2], documents[1::2], strict=True)]
        beside = is_beside(self.reference, model)
        missing = any(pair not in self.known or (beside and pair not in self.stops) for pair in pairs)
        if for_any(self.group, missing, model):
            found = of_start(self.reference, model, scorer, inputs, policy)
            if found is None or found.last is None:
                return None
            values = by_unit(torch.stack([found.sums, found.weighed], 1), 2).tolist()
            for pair, of_pair, of_stop in zip(pairs, values, found.last[0::2].tolist(), strict=True):
                if beside or pair not in self.known:
                    self.stops.setdefault(pair, of_stop)
                self.known.setdefault(pair, of_pair)
        known = np.array([self.known[pair] for pair in pairs], np.float32)
        answers = by_answer(known).to(self.job.device)
        lasts = torch.tensor([[self.stops.get(pair, torch.nan)] * 2 for pair in pairs], device=self.job.device)
        return ScoredAnswers(answers[:, 0], answers[:, 1], last=lasts.flatten())


def for_any(group: RankGroup | None, said: bool, model: PreTrainedModel | PeftModel) -> bool:
    """True if any rank says so, where a pass takes all of them."""
    if group is None or root_of(model) is None:
        return said
    return any(told[0] for told in group.agree("reference", [said]))


def is_beside(reference: PreTrainedModel | None, model: PreTrainedModel | PeftModel) -> bool:
    """True if a reference can be computed beside the model that is measured."""
    return reference is not None or hasattr(model, "disable_adapter")


def of_start(
    reference: PreTrainedModel | None,
    model: PreTrainedModel | PeftModel,
    scorer: AnswerScorer,
    inputs: dict[str, torch.Tensor],
    policy: ScoredAnswers | None,
) -> ScoredAnswers | None:
    """What a second model gives, or the measured one without its adapters; where there is neither, what the measured
    one has given; last tokens too. None where that did not fit into memory.
    """
    if not is_beside(reference, model):
        return policy
    if reference is not None:
        reshard_model(model)  # embedding and head of one model at a time
    with of_reference(reference, model):
        return forward_pass(model if reference is None else reference, scorer, inputs, last=True)


def forward_pass(
    model: PreTrainedModel | PeftModel,
    scorer: AnswerScorer,
    inputs: dict[str, torch.Tensor],
    *,
    aligned: bool = False,
    last: bool = False,
) -> ScoredAnswers | None:
    """A forward pass. Of a model with sharded weights, in which all ranks take part, None where memory ran out."""
    score = partial(scorer.score, model, inputs, aligned=aligned, last=last)
    return score() if root_of(model) is None else try_forward(model, score)


def summed(
    evaluator: Evaluator,
    items: Sequence[int],
    attempt: Callable[[Sequence[int]], Sums | None],
    where: Callable[[int], Origin],
    *,
    width: int,
    in_step: bool,
) -> Sums:
    """The ``width`` sums over all items. ``in_step``: ranks hold shards of the weights, and ``attempt`` gives None
    where memory ran out.
    """
    job, group = evaluator.job, evaluator.group
    size, reporter = job.recipe.eval.per_device_eval_batch_size, job.reporter
    if group is not None and in_step:
        return summed_in_step(group, items, size, attempt, where=where, reporter=reporter, width=width)

    def step(chosen: Sequence[int]) -> Sums:
        found = attempt(chosen)
        assert found is not None
        return found

    def run(mine: Sequence[int]) -> Iterator[tuple[Sequence[int], Sums]]:
        with reporter.progress(len(mine), "evaluating") as progress:
            for done, found in in_batches(mine, size, step, where=where, reporter=reporter, what="evaluation"):
                yield done, found
                progress.advance(len(done))

    if group is not None:
        return summed_over_ranks(group, items, size, run, width=width)
    total = [0.0] * width
    for _, found in run(items):
        total = [a + b for a, b in zip(total, found, strict=True)]
    return tuple(total)
