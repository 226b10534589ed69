"""Held-out pairs under a reward model: loss, accuracy, margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.evaluate.batching import Sums
from ftcli.evaluate.loss import LossResult, require_finite
from ftcli.evaluate.margins import Floats, RowTable, margins_of_pairs
from ftcli.evaluate.suite import Evaluator, JudgedRow
from ftcli.methods.preference.evaluate import summed
from ftcli.methods.preference.figures import controlled
from ftcli.methods.preference.pairs import answer_tokens
from ftcli.methods.reward.objective import (
    LENGTHS,
    MARGINS,
    SUMS,
    ScoreSums,
    measures,
    pair_losses,
    score_batch,
    score_rows,
)
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.backbone import compute_context, root_of
from ftcli.model.shards import reshard_model, try_forward

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

#: What held-out results call the numbers of metrics.
_NAMES = {
    "rewards/accuracies": "accuracy",
    "rewards/accuracies_alike": "accuracy_of_like_length",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
}
_WIDTH = 2 + SUMS


@dataclass(frozen=True, slots=True)
class RewardEvaluator(Evaluator):
    """Measures reward models on held-out pairs. They write no answers, so there are no samples."""

    def samples(self, model: PreTrainedModel | PeftModel, count: int) -> list[JudgedRow]:
        """None."""
        return []

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
        columns = np.concatenate([rows for _, rows in parts])
        total, tokens, *of_pairs = (sum(each) for each in zip(*(sums for sums, _ in parts), strict=True))
        mean, found = require_finite(total / max(of_pairs[0], 1)), measures(of_pairs)
        values, lengths = columns[:, 0], columns[:, 1:]
        more = {ours: found[name] for name, ours in _NAMES.items() if name in found} | controlled(values, lengths)
        margins = margins_of_pairs(sequences, values, lengths, self.job.tokenizer)
        return LossResult(mean, None, None, int(tokens), int(of_pairs[0]), more, margins)

    def _measured(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> tuple[Sums, Floats]:
        """Summed loss, tokens, and the sums of :class:`ScoreSums`; then of each pair its margin, and the tokens of both
        answers.
        """
        job, recipe, batches = self.job, self.job.recipe, self.job.batches(model)
        settings = recipe.reward or RewardModelConfig()
        table = RowTable(len(sequences) // 2, 3)

        def attempt(pairs: Sequence[int]) -> Sums | None:
            documents = [sequences[row] for pair in pairs for row in (2 * pair, 2 * pair + 1)]
            batch = score_batch(documents, batches, job.pad_token_id, margin=settings.margin)
            inputs = {name: value.to(job.device) for name, value in batch.items()}
            score = partial(score_rows, model, inputs)
            with compute_context(job.device, job.dtypes.compute, job.dtypes.autocast):
                found = try_forward(model, score) if in_step else score()
            if found is None:
                return None
            chosen, rejected = found[0::2], found[1::2]
            losses = pair_losses(chosen, rejected, inputs[MARGINS], settings.center_rewards_coefficient)
            total = float(losses.double().sum())
            lengths = torch.tensor([answer_tokens(document) for document in documents])
            table.fill(pairs, ((chosen.double() - rejected.double()).cpu(), lengths[0::2], lengths[1::2]))
            vector = ScoreSums.of(chosen, rejected, inputs[LENGTHS], torch.ones_like(chosen)).vector()
            return (total, float(inputs[LENGTHS].sum()), *vector.tolist())

        def where(pair: int) -> Origin:
            return sequences[2 * pair].row.origin

        every, was_training, in_step = range(len(sequences) // 2), model.training, root_of(model) is not None
        model.eval()
        try:
            with torch.no_grad():
                sums = summed(self, every, attempt, where, width=_WIDTH, in_step=in_step)
        finally:
            model.train(was_training)
        reshard_model(model)
        return sums, table.gathered(self.group, recipe.eval.per_device_eval_batch_size)
