"""Held-out pairs under a reward model: loss, accuracy, margin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Origin
from ftcli.evaluate.loss import LossResult, require_finite
from ftcli.evaluate.share import Sums
from ftcli.evaluate.suite import Evaluator
from ftcli.evaluate.tasks import JudgedRow
from ftcli.methods.preference.evaluate import summed
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
        return _result(self._sums_of(model, sequences))

    def losses(self, model: PreTrainedModel | PeftModel) -> tuple[LossResult | None, dict[str, LossResult]]:
        """Over all held-out files what one pass over all of them would give, and each file's."""
        sums = {name: self._sums_of(model, rows) for name, rows in self.by_dataset().items()}
        whole = _result([sum(each) for each in zip(*sums.values(), strict=True)]) if sums else None
        return whole, {name: _result(each) for name, each in sums.items()}

    def _sums_of(self, model: PreTrainedModel | PeftModel, sequences: Sequence[TokenizedRow]) -> Sums:
        """Summed loss, tokens, and the sums of :class:`ScoreSums`."""
        job, recipe, batches = self.job, self.job.recipe, self.job.batches(model)
        settings = recipe.reward or RewardModelConfig()

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
            vector = ScoreSums.of(chosen, rejected, inputs[LENGTHS], torch.ones_like(chosen)).vector()
            return (total, float(inputs[LENGTHS].sum()), *vector.tolist())

        def where(pair: int) -> Origin:
            return sequences[2 * pair].row.origin

        pairs, was_training, in_step = range(len(sequences) // 2), model.training, root_of(model) is not None
        model.eval()
        try:
            with torch.no_grad():
                sums = summed(self, pairs, attempt, where, width=_WIDTH, in_step=in_step)
        finally:
            model.train(was_training)
        reshard_model(model)
        return sums


def _result(sums: Sequence[float]) -> LossResult:
    total, tokens, *of_pairs = sums
    mean = require_finite(total / max(of_pairs[0], 1))
    found = measures(of_pairs)
    return LossResult(
        mean, None, None, int(tokens), int(of_pairs[0]), {n: found[m] for m, n in _NAMES.items() if m in found}
    )
