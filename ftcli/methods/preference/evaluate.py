"""Held-out pairs: loss, accuracy, margin, and what became of the answers' log-probabilities and of their stop token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ftcli.data.tokens import TokenizedRow, unit_digest
from ftcli.errors import Origin
from ftcli.evaluate.loss import LossResult, Sums, require_finite, summed
from ftcli.evaluate.margins import Floats, RowTable, margins_of_pairs
from ftcli.evaluate.suite import Evaluator
from ftcli.methods.preference.cache import LogProbs
from ftcli.methods.preference.figures import (
    PAIR_SUMS,
    controlled,
    held_out_names,
    margins_of,
    measures,
    pair_sums,
    stop_columns,
    stop_measures,
)
from ftcli.methods.preference.losses import PairLoss
from ftcli.methods.preference.objective import answers_of
from ftcli.methods.preference.pairs import SCORED, AnswerScorer, ScoredAnswers
from ftcli.methods.preference.reference import by_answer, by_unit
from ftcli.model.backbone import compute_context, head_of, root_of
from ftcli.model.shards import reshard_model, try_forward
from ftcli.train.assembly import of_reference

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class UnitEvaluator(Evaluator, ABC):
    """Measures models on held-out pairs or labelled answers: sums over them, and numbers of each."""

    @abstractmethod
    def scored(self, model: PreTrainedModel | PeftModel, rows: Sequence[TokenizedRow]) -> tuple[Sums, Floats]:
        """Sums over the units of these rows, and columns of numbers of each."""

    @abstractmethod
    def result(self, sums: Sequence[float], columns: Floats, rows: Sequence[TokenizedRow]) -> LossResult:
        """The result of :meth:`scored` on ``rows``."""

    def files_of(self, rows: Sequence[TokenizedRow]) -> dict[str, list[TokenizedRow]]:
        """Rows that are scored together, by any name: here all."""
        return {"": list(rows)}

    def scored_files(
        self, model: PreTrainedModel | PeftModel, files: dict[str, list[TokenizedRow]]
    ) -> dict[str, tuple[Sums, Floats]]:
        """:meth:`scored` of each file."""
        return {name: self.scored(model, rows) for name, rows in files.items()}

    def loss_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> LossResult:
        """The mean loss of the units, and ``more`` beside it."""
        files = self.files_of(sequences)
        return self._whole(files, self._scored(model, files))

    def losses(self, model: PreTrainedModel | PeftModel) -> tuple[LossResult | None, dict[str, LossResult]]:
        """Over all held-out files what one pass over all of them would give, and each file's."""
        files = self.by_dataset()
        found = self._scored(model, files)
        whole = self._whole(files, found) if found else None
        return whole, {name: self.result(*each, files[name]) for name, each in found.items()}

    def _scored(
        self, model: PreTrainedModel | PeftModel, files: dict[str, list[TokenizedRow]]
    ) -> dict[str, tuple[Sums, Floats]]:
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                found = self.scored_files(model, files)
        finally:
            model.train(was_training)
        reshard_model(model)
        return found

    def _whole(self, files: dict[str, list[TokenizedRow]], found: Mapping[str, tuple[Sums, Floats]]) -> LossResult:
        """The result of all files together."""
        sums = [sum(each) for each in zip(*(sums for sums, _ in found.values()), strict=True)]
        columns = np.concatenate([columns for _, columns in found.values()])
        return self.result(sums, columns, [row for rows in files.values() for row in rows])

    def summed(
        self,
        model: PreTrainedModel | PeftModel,
        count: int,
        attempt: Callable[[Sequence[int]], Sums | None],
        where: Callable[[int], Origin],
        *,
        width: int,
    ) -> Sums:
        """The ``width`` sums over so many units, by their numbers, over all ranks. Where these hold shards of the
        weights, ``attempt`` gives None where memory ran out.
        """
        size, sharded = self.job.recipe.eval.per_device_eval_batch_size, root_of(model) is not None
        reporter = self.job.reporter
        return summed(
            self.group, range(count), size, attempt, sharded=sharded, where=where, reporter=reporter, width=width
        )


@dataclass(frozen=True, slots=True)
class ComparedEvaluator(UnitEvaluator, ABC):
    """Measures models against a reference.

    Args:
        reference: A second model to compare with; None: the model without its adapters. Where there is neither, as in
            `ftcli eval` of a full fine-tune, it is the first model that is measured.
        known: What the reference gives each unit, by its digest. What is missing is computed once and added.
        gone: It is another model, and not there any more: all that is asked for is known, but for last tokens.
        stops: What it gives the last token of each row, or chosen row, likewise.
    """

    reference: PreTrainedModel | None = None
    known: dict[bytes, list[float]] = field(default_factory=dict, repr=False)
    gone: bool = False
    stops: dict[bytes, float] = field(default_factory=dict, repr=False)

    def scorer(self, model: PreTrainedModel | PeftModel, ld_alpha: float) -> AnswerScorer:
        """The scorer that lays rows out."""
        job, vocabulary = self.job, head_of(model).weight.shape[0]
        return AnswerScorer(job.batches(model), job.pad_token_id, vocabulary, ld_alpha, pixels=job.pixel_reader())

    def of_reference(
        self,
        model: PreTrainedModel | PeftModel,
        scorer: AnswerScorer,
        inputs: dict[str, Tensor],
        units: Sequence[tuple[TokenizedRow, ...]],
        policy: ScoredAnswers | None,
        *,
        last: bool = True,
    ) -> tuple[LogProbs, Tensor] | None:
        """The reference's log-probabilities of each unit, (units, width) float32 as :func:`by_unit` has it, and the
        last token of its first row, (units,), NaN where that is not known; None where it did not fit into memory. All
        ranks take part where any has to compute it and they hold shards of the weights.
        """
        digests, beside = [unit_digest(*unit) for unit in units], self._is_beside(model)
        missing = any(key not in self.known or (last and beside and key not in self.stops) for key in digests)
        if self.group is not None and root_of(model) is not None:
            missing = any(told[0] for told in self.group.agree("reference", [missing]))
        if missing:
            found = self._computed(model, scorer, inputs, policy)
            if found is None or found.last is None:
                return None
            rows = len(units[0])
            values = by_unit(torch.stack([found.sums, found.weighed], 1), rows).tolist()
            for key, of_unit, of_stop in zip(digests, values, found.last[::rows].tolist(), strict=True):
                if beside or key not in self.known:
                    self.stops.setdefault(key, of_stop)
                self.known.setdefault(key, of_unit)
        stops = [self.stops.get(key, math.nan) for key in digests]
        known = np.array([self.known[key] for key in digests], np.float32)
        return known, torch.tensor(stops, device=self.job.device)

    def _is_beside(self, model: PreTrainedModel | PeftModel) -> bool:
        """True if a reference can be computed beside the model that is measured."""
        return self.reference is not None or (hasattr(model, "disable_adapter") and not self.gone)

    def _computed(
        self,
        model: PreTrainedModel | PeftModel,
        scorer: AnswerScorer,
        inputs: dict[str, Tensor],
        policy: ScoredAnswers | None,
    ) -> ScoredAnswers | None:
        if not self._is_beside(model):
            assert not self.gone, "another model has been asked about all held-out rows"
            return policy
        if self.reference is not None:
            reshard_model(model)  # embedding and head of one model at a time
        with of_reference(self.reference, model):
            return forward_pass(model if self.reference is None else self.reference, scorer, inputs)


@dataclass(frozen=True, slots=True)
class PairEvaluator(ComparedEvaluator):
    """Measures models on held-out pairs, in which chosen and rejected answers take turns."""

    def result(self, sums: Sequence[float], columns: Floats, rows: Sequence[TokenizedRow]) -> LossResult:
        """Mean loss, and ``more`` beside it."""
        loss, (total, cross_entropy, *of_pairs) = self._loss(), sums
        pairs, (ours, others) = of_pairs[0], of_pairs[-2:]
        mean = require_finite(total / max(pairs, 1) + loss.sft_weight * cross_entropy / max(ours, 1))
        found = measures(of_pairs, compared=loss.reference)
        values, lengths = columns[:, 0], columns[:, 1:3]
        more = held_out_names(found) | controlled(values, lengths) | stop_measures(columns[:, 3:])
        margins = margins_of_pairs(rows, values, lengths, self.job.tokenizer)
        return LossResult(mean, None, None, int(ours + others), int(pairs), more, margins)

    def _loss(self) -> PairLoss:
        return PairLoss.of(self.job.recipe.train.method, self.job.recipe.preference)

    def scored(self, model: PreTrainedModel | PeftModel, rows: Sequence[TokenizedRow]) -> tuple[Sums, Floats]:
        """Summed loss, summed cross-entropy of the chosen answers, and the sums of :func:`pair_sums`; then of each pair
        its margin, the tokens of both answers, and what :func:`stop_columns` gives of the chosen one.
        """
        job, loss = self.job, self._loss()
        scorer, table = self.scorer(model, loss.ld_alpha), RowTable(len(rows) // 2, 5)

        def attempt(pairs: Sequence[int]) -> Sums | None:
            units = [(rows[2 * pair], rows[2 * pair + 1]) for pair in pairs]
            batch = scorer.batch([row for unit in units for row in unit])
            inputs = {name: value.to(job.device) for name, value in batch.items()}
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                policy = forward_pass(model, scorer, inputs, aligned=loss.weighs)
                known = self.of_reference(model, scorer, inputs, units, policy) if loss.reference else None
            if policy is None or policy.last is None or (loss.reference and known is None):
                return None
            compared = last = None
            if known is not None:
                by_row = by_answer(known[0]).to(job.device)
                compared, last = ScoredAnswers(by_row[:, 0], by_row[:, 1]), known[1]
            answers = answers_of(policy, compared, (inputs[SCORED] > 0).sum(1).float())
            total = float(loss.weighed_values(answers, policy.aligned).double().sum())
            sft = -float(policy.sums[0::2].double().sum())
            of_stops = stop_columns([chosen for chosen, _ in units], job.stops, policy.last[0::2], last)
            table.fill(pairs, (margins_of(answers, loss), answers.chosen_tokens, answers.rejected_tokens, *of_stops))
            return (total, sft, *pair_sums(answers, loss, torch.ones(len(pairs), device=job.device)).tolist())

        found = self.summed(model, len(rows) // 2, attempt, lambda pair: rows[2 * pair].row.origin, width=2 + PAIR_SUMS)
        return found, table.gathered(self.group, job.recipe.eval.per_device_eval_batch_size)


def forward_pass(
    model: PreTrainedModel | PeftModel, scorer: AnswerScorer, inputs: dict[str, Tensor], *, aligned: bool = False
) -> ScoredAnswers | None:
    """A forward pass, last tokens too. Of a model with sharded weights, in which all ranks take part, None where memory
    ran out.
    """
    score = partial(scorer.score, model, inputs, aligned=aligned, last=True)
    return score() if root_of(model) is None else try_forward(model, score)
