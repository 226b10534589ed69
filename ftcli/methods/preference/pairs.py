"""Pairs as tokens: what an epoch holds of them, how they are laid out, and the log-probabilities of their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ftcli.data.collate import documents_batch
from ftcli.data.order import Epochs, Mixture, mixture
from ftcli.data.pack import Packs
from ftcli.data.tokens import TokenizedRow, TokenTable
from ftcli.errors import Finding
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import head_of, hidden_states
from ftcli.model.loss import SUPERVISED, next_token_log_probs, supervised_positions
from ftcli.plan.batches import Batches

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.fused import DecoderStack

#: Inputs of a micro-batch that are not the layers'.
LABELS, SCORED = "labels", "scored"
#: Answers of which the chosen one is longer in so large a share of the pairs teach length.
_LONGER_SHARE = 0.65
#: Pairs below which that share says nothing.
_FEW = 30
#: Pairs that are named one by one where they are there both ways round.
_NAMED = 5
_REMOVE = "remove one of them"


def pair_epochs(table: TokenTable, weights: Sequence[float] | None, seed: int) -> Epochs:
    """Epochs whose units are pairs: rows 2 p (chosen) and 2 p + 1 (rejected) of the table.

    Args:
        weights: One for each source, or None to see every pair once.
    """
    pairs = len(table) // 2
    sizes = [(b - a) // 2 for a, b in zip(table.starts[:-1], table.starts[1:], strict=True)]
    mix = Mixture((pairs,), (pairs,)) if weights is None else mixture(sizes, weights)
    rows = np.arange(2 * pairs, dtype=np.int64)
    return Epochs(table, mix, Packs(rows, np.arange(2, 2 * pairs + 1, 2, dtype=np.int64)), seed)


def pair_findings(table: Sequence[TokenizedRow]) -> Iterator[Finding]:
    """FT458 where one pair is also there the other way round; FT459 where length gives the chosen answer away."""
    seen: dict[tuple[bytes, bytes], int] = {}
    turned = longer = unequal = 0
    for index in range(0, len(table), 2):
        chosen, rejected = table[index], table[index + 1]
        one, other = _digest(chosen), _digest(rejected)
        if (other, one) in seen:
            turned += 1
            if turned <= _NAMED:
                yield _turned(chosen, table[seen[other, one]])
        seen.setdefault((one, other), index)
        sizes = answer_tokens(chosen), answer_tokens(rejected)
        longer += sizes[0] > sizes[1]
        unequal += sizes[0] != sizes[1]
    if turned > _NAMED:
        yield Finding("FT458", f"and {turned - _NAMED:,} more pairs like these", None, _REMOVE, "warning")
    if unequal >= _FEW and longer / unequal > _LONGER_SHARE:
        yield Finding(
            "FT459",
            f"the chosen answer is the longer one in {longer / unequal:.0%} of the pairs: a model learns to write more",
            None,
            "consider preference.loss: sigmoid_norm (with beta around 5), simpo, or preference.ld_alpha: 0.5",
            "warning",
        )


def _digest(row: TokenizedRow) -> bytes:
    """Of its tokens. The tokens themselves, of all pairs, would be gigabytes."""
    return hashlib.blake2b(np.asarray(row.input_ids, dtype=np.int32).tobytes(), digest_size=16).digest()


def _turned(chosen: TokenizedRow, other: TokenizedRow) -> Finding:
    message = f"this pair prefers the answer that {other.row.origin} rejects: the two teach nothing together"
    return Finding("FT458", message, chosen.row.origin, _REMOVE, "warning")


def answer_tokens(row: TokenizedRow) -> int:
    """The tokens of a row that are scored; nothing predicts its first one."""
    return sum(label != IGNORE_INDEX for label in row.labels[1:])


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """The answers of a batch, scored: chosen and rejected ones in turn, (2 P,) float32 each.

    Attributes:
        sums: Their log-probabilities in nats.
        weighed: The same with the weights of ``ld_alpha``.
        aligned: Means over their tokens of log p_y - log sum_v p_v^2, without a gradient, where they are asked for:
            how likely an answer is for the model, as against one of its own.
    """

    sums: Tensor
    weighed: Tensor
    aligned: Tensor | None = None


class AnswerScorer:
    """Lays pairs out and scores their answers, in one way for policy and reference, in float32.

    Args:
        batches: How rows are laid out.
        ld_alpha: Weight of an answer's tokens beyond the length of the shorter one of its pair.
    """

    def __init__(self, batches: Batches, pad_token_id: int, vocab_size: int, ld_alpha: float) -> None:
        self._batches, self._pad_token_id = batches, pad_token_id
        self._vocab_size, self._ld_alpha = vocab_size, ld_alpha

    def batch(self, documents: Sequence[TokenizedRow]) -> dict[str, Tensor]:
        """Chosen and rejected rows in turn as a batch on the host: what the layers take, ``labels``, ``supervised``,
        and ``scored`` (2 P, longest answer) float32, the weight of each token that is scored.
        """
        found = documents_batch(documents, self._batches, self._pad_token_id)
        sizes = [answer_tokens(document) for document in documents]
        found[SCORED] = self._weights(sizes)
        found[SUPERVISED] = supervised_positions(found[LABELS], self._vocab_size)
        return found

    def _weights(self, sizes: Sequence[int]) -> Tensor:
        count = torch.tensor(sizes)[:, None]
        column = torch.arange(max(sizes))[None]
        if self._ld_alpha == 1:
            return (column < count).float()
        shorter = count.view(-1, 2).amin(1).repeat_interleave(2)[:, None]
        weights = torch.where(column < shorter, 1.0, self._ld_alpha)
        # A weight of 0 is a token that is scored all the same: the sums without weights count it.
        return torch.where(column < count, weights.clamp(min=torch.finfo(torch.float32).tiny), 0.0)

    @staticmethod
    def score(
        model: PreTrainedModel | PeftModel,
        inputs: dict[str, Tensor],
        stack: DecoderStack | None = None,
        *,
        aligned: bool = False,
    ) -> ScoredAnswers:
        """The log-probabilities of a batch's answers under ``model``; no logits are made. ``aligned`` takes one product
        of the head more.
        """
        layers = {name: value for name, value in inputs.items() if name not in (LABELS, SCORED, SUPERVISED)}
        states = hidden_states(model, layers, stack)

        def log_probs(temperature: float) -> Tensor:
            """(2 P, longest answer), 0 where nothing is scored."""
            found, _ = next_token_log_probs(
                states, head_of(model), inputs[LABELS], temperature=temperature, supervised=inputs[SUPERVISED]
            )
            return torch.zeros_like(weights).masked_scatter(weights > 0, found)

        weights = inputs[SCORED]
        by_answer, means = log_probs(1.0), None
        if aligned:
            # With L_T = log sum_v exp(z_v / T): log p_y - log sum_v p_v^2 is (2 z_y - L_{1/2}) - (z_y - L_1).
            with torch.no_grad():
                means = (log_probs(0.5) - by_answer).sum(1) / (weights > 0).sum(1)
        return ScoredAnswers(by_answer.sum(1), (by_answer * weights).sum(1), means)
