"""Held-out labelled answers: loss with the KL of all of them, accuracy, margin, what became of log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.evaluate.batching import Sums
from ftcli.evaluate.loss import LossResult, require_finite
from ftcli.evaluate.margins import Floats, RowTable, margins_of_answers
from ftcli.evaluate.suite import Evaluator
from ftcli.methods.kto.losses import LabelledAnswers, LabelLoss
from ftcli.methods.kto.mismatched import mismatched_rows
from ftcli.methods.kto.sums import SUMS, LabelSums, measures
from ftcli.methods.preference.cache import unit_digest
from ftcli.methods.preference.evaluate import for_any, forward_pass, is_beside, of_start, summed
from ftcli.methods.preference.figures import stop_columns, stop_measures
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.model.backbone import compute_context, head_of, root_of
from ftcli.model.shards import reshard_model

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: What held-out results call the numbers of metrics.
_NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "logps/chosen": "chosen_logp",
    "logps/rejected": "rejected_logp",
    "chosen_rose": "chosen_rose",
    "rejected_fell": "rejected_fell",
    "kl": "kl",
}
#: Of a batch's answers, (N,) each: log-probabilities, what they have gained over the reference, tokens; then what
#: :func:`~ftcli.methods.preference.figures.stop_columns` gives.
_Scores = tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]
#: Of each answer: its reward, its tokens, and the stop columns of desirable ones.
_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class LabelEvaluator(Evaluator):
    """Measures models on held-out labelled answers.

    Args:
        reference: A second model to compare with; None: the model without its adapters. Where there is neither, as in
            `ftcli eval` of a full fine-tune, it is the first model that is measured.
        known: What the reference gives each row, mismatched ones too, by its digest. What is missing is computed once
            and added.
        stops: What it gives the last token of each row, likewise.
    """

    reference: PreTrainedModel | None = None
    known: dict[bytes, float] = field(default_factory=dict, repr=False)
    stops: dict[bytes, float] = field(default_factory=dict, repr=False)

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> LossResult:
        """The mean loss of the answers, and ``more`` beside it."""
        files: dict[str, list[TokenizedRow]] = {}
        for tokens in sequences:
            files.setdefault(tokens.row.source, []).append(tokens)
        whole, _ = self._measured(model, files)
        assert whole is not None
        return whole

    def losses(self, model: PreTrainedModel | PeftModel) -> tuple[LossResult | None, dict[str, LossResult]]:
        """Over all held-out files what one pass over all of them would give, and each file's; all with one KL."""
        return self._measured(model, self.by_dataset())

    def _measured(
        self, model: PreTrainedModel | PeftModel, files: dict[str, list[TokenizedRow]]
    ) -> tuple[LossResult | None, dict[str, LossResult]]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                kl = self._kl(model, files)
                found = {name: self._scored(model, rows, kl) for name, rows in files.items()}
        finally:
            model.train(was_training)
        reshard_model(model)
        all_rows = [row for rows in files.values() for row in rows]
        whole = self._result(list(found.values()), all_rows, kl) if found else None
        return whole, {name: self._result([each], files[name], kl) for name, each in found.items()}

    def _result(self, parts: Sequence[tuple[Sums, Floats]], sequences: Sequence[TokenizedRow], kl: float) -> LossResult:
        """Of the answers of all ``parts``, which are those of ``sequences``."""
        loss, columns = self._loss(), np.concatenate([rows for _, rows in parts])
        total, *of_answers = (sum(each) for each in zip(*(sums for sums, _ in parts), strict=True))
        of_answers[-2:] = [kl, 1.0]
        wanted, unwanted, logp, tokens, other_tokens = (of_answers[n] for n in (0, 1, 6, 8, 9))
        answers = wanted + unwanted
        mean = require_finite(total / max(answers, 1) - loss.sft_weight * logp / max(tokens, 1))
        found = measures(of_answers, kl=loss.estimates_kl)
        more = {ours: found[name] for name, ours in _NAMES.items() if name in found} | stop_measures(columns[:, 2:])
        margins = margins_of_answers(sequences, columns[:, 0], columns[:, 1], self.job.tokenizer)
        return LossResult(mean, None, None, int(tokens + other_tokens), int(answers), more, margins)

    def _loss(self) -> LabelLoss:
        return LabelLoss.of(self.job.recipe.preference)

    def _kl(self, model: PreTrainedModel | PeftModel, files: dict[str, list[TokenizedRow]]) -> float:
        """z of all held-out rows; 0 for a loss that needs none."""
        loss, gained, count = self._loss(), 0.0, 0
        for rows in files.values() if loss.estimates_kl else ():
            made = mismatched_rows(rows, self.job.recipe.data.max_seq_len)
            (found,) = self._summed(model, made, lambda _, scores: (float(scores[1].double().sum()),), width=1)
            gained, count = gained + found, count + len(made)
        return max(0.0, gained / count) if count else 0.0

    def _scored(self, model: PreTrainedModel | PeftModel, rows: list[TokenizedRow], kl: float) -> tuple[Sums, Floats]:
        """Summed loss, and the sums of :class:`LabelSums`; then of each answer the columns of :data:`_COLUMNS`."""
        loss, table = self._loss(), RowTable(len(rows), _COLUMNS)

        def of_batch(numbers: Sequence[int], scores: _Scores) -> Sums:
            logp, gained, tokens, of_stops = scores
            labels = torch.tensor([rows[number].value for number in numbers], device=logp.device)
            stops = (torch.where(labels > 0, column, torch.nan) for column in of_stops)
            table.fill(numbers, (loss.beta * gained.double(), tokens, *stops))
            answers = LabelledAnswers(gained, labels, torch.tensor(kl, device=logp.device))
            total = float(loss.values(answers).double().sum())
            return (total, *LabelSums.of(answers, logp, tokens, loss.beta).vector().tolist())

        sums = self._summed(model, rows, of_batch, width=1 + SUMS, last=True)
        return sums, table.gathered(self.group, self.job.recipe.eval.per_device_eval_batch_size)

    def _summed(
        self,
        model: PreTrainedModel | PeftModel,
        rows: Sequence[TokenizedRow],
        of_batch: Callable[[Sequence[int], _Scores], Sums],
        *,
        width: int,
        last: bool = False,
    ) -> Sums:
        """Sums over ``rows``, of each batch's answers, by their numbers, as they are scored, over all ranks.

        ``last``: the stop columns are asked for.
        """
        job = self.job
        vocabulary = head_of(model).weight.shape[0]
        scorer = AnswerScorer(job.batches(model), job.pad_token_id, vocabulary, ld_alpha=1.0)

        def attempt(numbers: Sequence[int]) -> Sums | None:
            documents = [rows[number] for number in numbers]
            inputs = {key: value.to(job.device) for key, value in scorer.batch(documents).items()}
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                policy = forward_pass(model, scorer, inputs, last=True)
                compared = self._compared(model, scorer, inputs, documents, policy, last=last)
            if policy is None or policy.last is None or compared is None:
                return None
            reference, of_last = compared
            of_stops = stop_columns(documents, job.stops, policy.last, of_last)
            tokens = (inputs[SCORED] > 0).sum(1).float()
            return of_batch(numbers, (policy.sums, policy.sums - reference, tokens, of_stops))

        def where(number: int) -> Origin:
            return rows[number].row.origin

        return summed(self, range(len(rows)), attempt, where, width=width, in_step=root_of(model) is not None)

    def _compared(
        self,
        model: PreTrainedModel | PeftModel,
        scorer: AnswerScorer,
        inputs: dict[str, Tensor],
        documents: Sequence[TokenizedRow],
        policy: ScoredAnswers | None,
        *,
        last: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """The log-probabilities of the answers and, for ``last``, of their last tokens under the reference, NaN where
        they are not known; None where that did not fit into memory.
        """
        rows, beside = [unit_digest(document) for document in documents], is_beside(self.reference, model)
        missing = any(row not in self.known or (last and beside and row not in self.stops) for row in rows)
        if for_any(self.group, missing, model):
            found = of_start(self.reference, model, scorer, inputs, policy)
            if found is None or found.last is None:
                return None
            for row, of_row, of_stop in zip(rows, found.sums.tolist(), found.last.tolist(), strict=True):
                if beside or row not in self.known:
                    self.stops.setdefault(row, of_stop)
                self.known.setdefault(row, of_row)
        sums, stops = ([known.get(row, math.nan) for row in rows] for known in (self.known, self.stops))
        return torch.tensor(sums, device=self.job.device), torch.tensor(stops, device=self.job.device)
