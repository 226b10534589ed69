"""Reward modelling as a run on rows: pairs, and held-out ones under a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch

from ftcli.config.recipe import Recipe
from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow, TokenTable
from ftcli.errors import Finding
from ftcli.evaluate.loss import LossResult, Sums, require_finite
from ftcli.evaluate.margins import Floats, RowTable, margins_of_pairs
from ftcli.evaluate.suite import JudgedRow
from ftcli.job import Job
from ftcli.methods.preference.evaluate import UnitEvaluator
from ftcli.methods.preference.figures import ORDER_SUMS, controlled, held_out_names, order_measures, order_sums
from ftcli.methods.preference.pairs import pair_findings
from ftcli.methods.preference.train import OfPairs
from ftcli.methods.reward.objective import (
    MARGINS,
    RewardObjective,
    both_lengths,
    pair_losses,
    score_batch,
    score_rows,
)
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.backbone import compute_context, root_of
from ftcli.model.shards import try_forward
from ftcli.rows.row import data_error
from ftcli.train.on_rows import ObjectiveParts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class RewardEvaluator(UnitEvaluator):
    """Measures reward models on held-out pairs: loss, accuracy, margin. They write no answers: there are no samples."""

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[JudgedRow]:
        """None."""
        return []

    def result(self, sums: Sequence[float], columns: Floats, rows: Sequence[TokenizedRow]) -> LossResult:
        """Mean loss, and ``more`` beside it."""
        total, tokens, *of_pairs = sums
        mean = require_finite(total / max(of_pairs[0], 1))
        values, lengths = columns[:, 0], columns[:, 1:]
        more = held_out_names(order_measures(of_pairs)) | controlled(values, lengths)
        margins = margins_of_pairs(rows, values, lengths, self.job.tokenizer)
        return LossResult(mean, None, None, int(tokens), int(of_pairs[0]), more, margins)

    def scored(self, model: PreTrainedModel | PeftModel, rows: Sequence[TokenizedRow]) -> tuple[Sums, Floats]:
        """Summed loss, tokens, and the sums of :func:`order_sums`; then of each pair its margin, and the tokens of both
        answers.
        """
        job, batches, sharded = self.job, self.job.batches(model), root_of(model) is not None
        settings = job.recipe.reward or RewardModelConfig()
        table = RowTable(len(rows) // 2, 3)

        def attempt(pairs: Sequence[int]) -> Sums | None:
            documents = [rows[row] for pair in pairs for row in (2 * pair, 2 * pair + 1)]
            batch = score_batch(documents, batches, job.pad_token_id, margin=settings.margin)
            inputs = {name: value.to(job.device) for name, value in batch.items()}
            score = partial(score_rows, model, inputs)
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                found = try_forward(model, score) if sharded else score()
            if found is None:
                return None
            chosen, rejected = found[0::2], found[1::2]
            losses = pair_losses(chosen, rejected, inputs[MARGINS], settings.center_rewards_coefficient)
            total, tokens = float(losses.double().sum()), sum(len(document.input_ids) for document in documents)
            lengths = both_lengths(inputs)
            table.fill(pairs, (chosen.double() - rejected.double(), *lengths))
            sums = order_sums(chosen, rejected, lengths, torch.ones_like(chosen))
            return (total, float(tokens), *sums.tolist())

        width = 2 + ORDER_SUMS
        found = self.summed(model, len(rows) // 2, attempt, lambda pair: rows[2 * pair].row.origin, width=width)
        return found, table.gathered(self.group, job.recipe.eval.per_device_eval_batch_size)


class RewardModelling(OfPairs):
    """Pairs of answers, of which one is to get the higher score."""

    evaluates = RewardEvaluator

    def findings(self, recipe: Recipe, table: TokenTable) -> Iterator[Finding]:
        """Pairs that teach something else than they say. FT409, a note, for margins that nobody asks for.

        Raises FtcliError FT462 (exit 4) where a margin is missing that is asked for.
        """
        margins = table.values[0::2]
        if (recipe.reward or RewardModelConfig()).margin:
            count = int((margins == 0).sum())
            if count:
                raise data_error(
                    "FT462",
                    f"reward.margin asks for the column `margin`, and {count:,} of {len(margins):,} pairs have none, "
                    "or 0",
                    table[2 * int((margins == 0).argmax())].row.origin,
                    help="add it, map another column in data.columns, or remove reward.margin",
                )
        elif margins.any():
            yield Finding("FT409", "the column `margin` is not read", None, "reward.margin: true asks for it", "note")
        yield from pair_findings(table)

    def objective(
        self, job: Job, model: Any, epochs: Epochs, reference: Any, **parts: Unpack[ObjectiveParts]
    ) -> RewardObjective:
        return RewardObjective(job, model, epochs, **parts)
