"""Reward modelling: the score of a pair's chosen answer is to exceed that of the rejected one.

With s_w and s_l the scores of both, m the margin that the data gives (0 without one) and c the centring coefficient,
the loss of a pair is -log sigma(s_w - s_l - m) + c (s_w + s_l)^2 (Bradley and Terry 1952; Touvron et al. 2023,
arXiv:2307.09288, for the margin; Eisenstein et al. 2023, arXiv:2312.09244, for the second term).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.data.collate import documents_batch
from ftcli.data.order import Epochs
from ftcli.data.shared import branched_batch, lengths_once
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.backbone import compute_context, hidden_states
from ftcli.model.score_head import scores
from ftcli.plain import JsonObject
from ftcli.plan.batches import Batches
from ftcli.run.metrics import MetricsLine
from ftcli.train.build import build_loop
from ftcli.train.checkpoint_state import Progress
from ftcli.train.epochs import EpochObjective
from ftcli.train.loop import TrainerHooks, TrainingLoop
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts
from ftcli.train.sums import StepSums

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart
    from ftcli.run.process_group import RankGroup

#: Inputs of a micro-batch that are not the layers': the flat position of each row's last token (2 P,), what each pair
#: asks for (P,), whether a pair counts (P,), and the length of each row (2 P,).
ENDS, MARGINS, PAIRS, LENGTHS = "ends", "margins", "pairs", "answer_lengths"
_OWN = (ENDS, MARGINS, PAIRS, LENGTHS, "labels")
#: Answers that differ in length by this share at most are of like length.
_ALIKE = 0.1


def score_batch(
    documents: Sequence[TokenizedRow], batches: Batches, pad_token_id: int, *, margin: bool
) -> dict[str, Tensor]:
    """Chosen and rejected rows in turn as a batch on the host, with the inputs named above; ``margin``: with theirs."""
    sizes = torch.tensor([len(document.input_ids) for document in documents])
    if batches.shares_prompts:
        pairs = list(zip(documents[0::2], documents[1::2], strict=True))
        found, places = branched_batch(pairs, batches, pad_token_id)
        found[ENDS] = torch.tensor([int(at[-1]) for at in places])
    else:
        found = documents_batch(documents, batches, pad_token_id)
        rows, width = found["input_ids"].shape
        starts = sizes.cumsum(0) - sizes if rows != len(documents) else torch.arange(rows) * width
        found[ENDS] = starts + sizes - 1
    asked = [document.value if margin else 0.0 for document in documents[0::2]]
    found[MARGINS] = torch.tensor(asked, dtype=torch.float32)
    found[PAIRS] = torch.ones(len(documents) // 2)
    found[LENGTHS] = sizes.float()
    return found


def score_rows(
    model: PreTrainedModel | PeftModel, inputs: dict[str, Tensor], stack: DecoderStack | None = None
) -> Tensor:
    """The score of each row of :func:`score_batch`, (2 P,) float32."""
    layers = {name: value for name, value in inputs.items() if name not in _OWN}
    states = hidden_states(model, layers, stack).tensor
    return scores(model, states.flatten(0, 1).index_select(0, inputs[ENDS]))


def pair_losses(chosen: Tensor, rejected: Tensor, margins: Tensor, centring: float) -> Tensor:
    """The loss of each pair, (P,), of scores and margins (P,)."""
    loss = -F.logsigmoid(chosen - rejected - margins)
    return loss + centring * (chosen + rejected).square() if centring else loss


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """Sums over pairs, in float64: what metrics are means of. ``right`` counts a tie as one half."""

    pairs: Tensor
    chosen: Tensor
    rejected: Tensor
    right: Tensor
    alike: Tensor
    alike_right: Tensor

    @classmethod
    def of(cls, chosen: Tensor, rejected: Tensor, lengths: Tensor, weights: Tensor) -> ScoreSums:
        """Of scores (P,) and the rows' lengths (2 P,); ``weights`` (P,) are 0 for pairs that do not count."""
        right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
        one, other = lengths[0::2], lengths[1::2]
        alike = ((one - other).abs() <= _ALIKE * torch.minimum(one, other)).float()
        each = (torch.ones_like(chosen), chosen, rejected, right, alike, alike * right)
        return cls(*((value.detach() * weights).double().sum() for value in each))

    def vector(self) -> Tensor:
        """All of them, (6,)."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


#: How many numbers :class:`ScoreSums` has.
SUMS = len(fields(ScoreSums))


def measures(sums: Sequence[float]) -> dict[str, float]:
    """Means by name, of :meth:`ScoreSums.vector`."""
    pairs, chosen, rejected, right, alike, alike_right = sums
    if not pairs:
        return {}
    return {
        "rewards/chosen": chosen / pairs,
        "rewards/rejected": rejected / pairs,
        "rewards/margins": (chosen - rejected) / pairs,
        "rewards/accuracies": right / pairs,
        **({"rewards/accuracies_alike": alike_right / alike} if alike else {}),
    }


class RewardObjective(EpochObjective):
    """The mean loss of a step's pairs, whatever micro-batches and ranks it is split into.

    Args:
        model: What learns, with a score head (:mod:`ftcli.model.score_head`).
        stack: The decoder layers as one function, where all are on the kernels.
    """

    def __init__(
        self,
        job: Job,
        model: PreTrainedModel | PeftModel,
        epochs: Epochs,
        *,
        group: RankGroup | None,
        stack: DecoderStack | None,
    ) -> None:
        super().__init__(job, epochs, group)
        self._model, self._stack, self._device, self._dtypes = model, stack, job.device, job.dtypes
        self._batches, self._pad_token_id = job.batches(model), job.pad_token_id
        self._settings = job.recipe.reward or RewardModelConfig()
        self._sums = StepSums("score_sums", SUMS, job.device, group)

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The pairs' rows in turn, chosen and rejected."""
        documents = [tokens for unit in units for tokens in self._epochs.members(unit)]
        inputs = score_batch(documents, self._batches, self._pad_token_id, margin=self._settings.margin)
        computed = inputs["input_ids"].numel()
        if blank:
            inputs[PAIRS] = torch.zeros(len(units))
            return MicroBatch(inputs, (), TokenCounts(computed=computed))
        real = int((lengths_once(documents) if self._batches.shares_prompts else inputs[LENGTHS]).sum())
        return MicroBatch(inputs, tuple(units), TokenCounts(len(documents), real, computed, len(units)))

    def begin(self, step: int) -> None:
        """Notes the sums so far."""
        self._sums.begin()

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the pairs over those of the whole step."""
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            found = score_rows(self._model, inputs, self._stack)
        chosen, rejected, weights = found[0::2], found[1::2], inputs[PAIRS]
        self._sums.add(ScoreSums.of(chosen, rejected, inputs[LENGTHS], weights).vector())
        losses = pair_losses(chosen, rejected, inputs[MARGINS], self._settings.center_rewards_coefficient)
        return (losses * weights).sum() / step.pairs

    def reduced(self) -> None:
        """Adds up the metrics of all ranks' micro-batches."""
        self._sums.reduce()

    def undo(self, step: int) -> None:
        """Forgets the step."""
        self._sums.undo()

    def metrics(self) -> MetricsLine:
        """Means over the pairs since the last line."""
        return measures(self._sums.take())

    def state(self) -> JsonObject:
        """The sums of a half-filled line."""
        return self._sums.state()

    def restore(self, state: JsonObject, progress: Progress) -> None:
        """Resumes with these sums."""
        self._sums.restore(state)


def build_reward(
    job: Job,
    model: PreTrainedModel | PeftModel,
    epochs: Epochs,
    hooks: TrainerHooks,
    group: RankGroup | None = None,
) -> TrainingLoop:
    """The loop that trains ``model`` to score."""

    def objective(stack: DecoderStack | None, sequence: SequencePart | None) -> RewardObjective:
        return RewardObjective(job, model, epochs, group=group, stack=stack)

    return build_loop(job, model, objective, hooks, group)
