"""Reward modelling: the score of a pair's chosen answer is to exceed that of the rejected one.

With s_w and s_l the scores of both, m the margin that the data gives (0 without one) and c the centring coefficient,
the loss of a pair is -log sigma(s_w - s_l - m) + c (s_w + s_l)^2 (Bradley and Terry 1952; Touvron et al. 2023,
arXiv:2307.09288, for the margin; Eisenstein et al. 2023, arXiv:2312.09244, for the second term).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.data.collate import branched_batch, documents_batch, lengths_once, part_of
from ftcli.data.order import Epochs
from ftcli.data.tokens import TokenizedRow
from ftcli.methods.preference.figures import ORDER_SUMS, order_measures, order_sums
from ftcli.methods.preference.pairs import answer_tokens
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.model.backbone import compute_context, hidden_states, within_root
from ftcli.model.score_head import scores
from ftcli.plan.batches import Batches
from ftcli.run.metrics import MetricsLine
from ftcli.train.epochs import SummedObjective
from ftcli.train.on_rows import ObjectiveParts
from ftcli.train.parallel import Divisors, MicroBatch, TokenCounts

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.job import Job
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart

#: Inputs of a micro-batch that are not the layers': the flat position of each row's last token (2 P,), what each pair
#: asks for (P,), whether a pair counts (P,), and the tokens of each answer (2 P,). Where ranks share rows, the
#: positions are those of the last tokens in this rank's part, and one more input says whose they are (2 P,).
ENDS, MARGINS, PAIRS, LENGTHS, HERE = "ends", "margins", "pairs", "answer_lengths", "here"
_OWN = (ENDS, MARGINS, PAIRS, LENGTHS, HERE, "labels", "targets")


def score_batch(
    documents: Sequence[TokenizedRow],
    batches: Batches,
    pad_token_id: int,
    *,
    margin: bool,
    sequence: SequencePart | None = None,
) -> dict[str, Tensor]:
    """Chosen and rejected rows in turn as a batch on the host, with the inputs named above; ``margin``: with theirs.

    ``sequence``: this rank's part of each row, where ranks share rows.
    """
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
    if sequence is not None:
        found = _part_of(found, sequence)
    asked = [document.value if margin else 0.0 for document in documents[0::2]]
    found[MARGINS] = torch.tensor(asked, dtype=torch.float32)
    found[PAIRS] = torch.ones(len(documents) // 2)
    found[LENGTHS] = torch.tensor([float(answer_tokens(document)) for document in documents])
    return found


def _part_of(batch: dict[str, Tensor], sequence: SequencePart) -> dict[str, Tensor]:
    """This rank's part of a batch, and which rows end in it."""
    ends, whole = batch.pop(ENDS), batch["input_ids"].shape[1]
    found = part_of(batch, sequence.part, sequence.parts)
    width = found["input_ids"].shape[1]
    row, column = ends // whole, ends % whole
    here = column // width == sequence.part
    return {**found, ENDS: (row * width + column % width)[here], HERE: here}


def score_rows(
    model: PreTrainedModel | PeftModel,
    inputs: dict[str, Tensor],
    stack: DecoderStack | None = None,
    sequence: SequencePart | None = None,
) -> Tensor:
    """The score of each row of :func:`score_batch`, (2 P,) float32; of rows that ranks share, on each of these."""
    layers = {name: value for name, value in inputs.items() if name not in _OWN}

    def compute() -> Tensor:
        states = hidden_states(model, layers, stack, sequence=sequence).tensor
        return scores(model, states.flatten(0, 1).index_select(0, inputs[ENDS]))

    found = within_root(model, compute)
    if sequence is None:
        return found
    zeros = torch.zeros(inputs[HERE].shape, dtype=found.dtype, device=found.device)
    return sequence.summed(zeros.masked_scatter(inputs[HERE], found))


def pair_losses(chosen: Tensor, rejected: Tensor, margins: Tensor, centring: float) -> Tensor:
    """The loss of each pair, (P,), of scores and margins (P,)."""
    loss = -F.logsigmoid(chosen - rejected - margins)
    return loss + centring * (chosen + rejected).square() if centring else loss


def both_lengths(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens of chosen and of rejected answers, (P,) each."""
    return inputs[LENGTHS][0::2], inputs[LENGTHS][1::2]


class RewardObjective(SummedObjective):
    """The mean loss of a step's pairs, whatever micro-batches and ranks it is split into."""

    def __init__(
        self, job: Job, model: PreTrainedModel | PeftModel, epochs: Epochs, **parts: Unpack[ObjectiveParts]
    ) -> None:
        super().__init__(job, model, epochs, "score_sums", ORDER_SUMS, **parts)
        self._batches, self._pad_token_id = job.batches(model), job.pad_token_id
        self._settings = job.recipe.reward or RewardModelConfig()

    def micro_batch(self, units: Sequence[int], *, blank: bool) -> MicroBatch:
        """The pairs' rows in turn, chosen and rejected."""
        documents = self.documents(units)
        inputs = score_batch(
            documents, self._batches, self._pad_token_id, margin=self._settings.margin, sequence=self._sequence
        )
        if blank:
            inputs[PAIRS] = torch.zeros(len(units))
        shares = self._batches.shares_prompts
        real = int(lengths_once(documents).sum()) if shares else sum(len(one.input_ids) for one in documents)
        counts = TokenCounts(len(documents), real, inputs["input_ids"].numel(), len(units))
        return self.counted_batch(inputs, units, counts, blank=blank)

    def loss(self, inputs: dict[str, Tensor], step: Divisors) -> Tensor:
        """The summed loss of the pairs over those of the whole step."""
        with compute_context(self._device, self._dtypes.compute, self._dtypes.autocast):
            found = score_rows(self._model, inputs, self._stack, self._sequence)
        chosen, rejected, weights = found[0::2], found[1::2], inputs[PAIRS]
        losses = pair_losses(chosen, rejected, inputs[MARGINS], self._settings.center_rewards_coefficient)
        sums = order_sums(chosen, rejected, both_lengths(inputs), weights)
        return self.noted((losses * weights).sum() / step.pairs, sums)

    def metrics(self) -> MetricsLine:
        """Means over the pairs since the last line."""
        return order_measures(self._sums.take())
