"""Pairs as tokens: what an epoch holds of them, how they are laid out, and the log-probabilities of their answers."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ftcli.data.collate import documents_batch, lengths_once, part_of, shared_batch, with_images
from ftcli.data.order import Epochs, Mixture, Packs, mixture
from ftcli.data.tokens import TokenizedRow, TokenTable, digest_of
from ftcli.errors import Finding
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import head_of, hidden_states, within_root
from ftcli.model.loss import SUPERVISED, log_probs_at, next_token_log_probs, supervised_positions, target_positions
from ftcli.plan.batches import Batches

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.data.pixels import PixelReader
    from ftcli.data.prepare import PreparedData
    from ftcli.job import Job
    from ftcli.model.backbone import HiddenStates
    from ftcli.model.fused import DecoderStack
    from ftcli.model.sequence_parallel import SequencePart

#: Inputs of a micro-batch that are not the layers'. Where ranks share rows, or pairs
#: their prompts, ``targets`` take the place of labels; ``here`` says which of the scored tokens are this rank's.
LABELS, TARGETS, SCORED, HERE = "labels", "targets", "scored", "here"
_NOT_OF_LAYERS = (LABELS, TARGETS, SCORED, HERE, SUPERVISED)
#: Answers of which the chosen one is longer in so large a share of the pairs teach length.
_LONGER_SHARE = 0.65
#: Pairs below which that share says nothing.
_FEW = 30
#: Pairs that are named one by one where they are there both ways round.
_NAMED = 5
_REMOVE = "remove one of them"


def epochs_of_pairs(job: Job, prepared: PreparedData) -> Epochs:
    """The recipe's training pairs."""
    return pair_epochs(prepared.sequences, job.recipe.data.weights, job.recipe.run.seed)


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


def synthetic_pairs(rows: Sequence[TokenizedRow], prompt: int | None, seed: int) -> Epochs:
    """Epochs of pairs of two rows in turn, of which the second begins as the first: with ``prompt`` tokens, or with a
    third of the shorter row.
    """
    made = []
    for one, other in zip(rows[0::2], rows[1::2], strict=True):
        shorter = min(len(one.input_ids), len(other.input_ids))
        asked = max(1, min(shorter // 3 if prompt is None else prompt, shorter - 1))
        for row in (one, other):
            answer = list(row.input_ids[asked:])
            ids = [*one.input_ids[:asked], *answer]
            made.append(TokenizedRow(row.row, ids, [*[IGNORE_INDEX] * asked, *answer]))
    pairs = len(made) // 2
    ends = np.arange(2, 2 * pairs + 1, 2, dtype=np.int64)
    return Epochs(made, Mixture((pairs,), (pairs,)), Packs(np.arange(2 * pairs, dtype=np.int64), ends), seed)


def pair_findings(table: Sequence[TokenizedRow]) -> Iterator[Finding]:
    """FT458 where one pair is also there the other way round; FT459 where length gives the chosen answer away."""
    seen: dict[tuple[bytes, bytes], int] = {}
    turned = longer = unequal = 0
    for index in range(0, len(table), 2):
        chosen, rejected = table[index], table[index + 1]
        one, other = digest_of(chosen), digest_of(rejected)
        if (other, one) in seen:
            turned += 1
            if turned <= _NAMED:
                where = table[seen[other, one]].row.origin
                message = f"this pair prefers the answer that {where} rejects: the two teach nothing together"
                yield Finding("FT458", message, chosen.row.origin, _REMOVE, "warning")
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


def answer_tokens(row: TokenizedRow) -> int:
    """The tokens of a row that are scored; nothing predicts its first one."""
    return sum(label != IGNORE_INDEX for label in row.labels[1:])


def ends_at(row: TokenizedRow, stops: Container[int]) -> bool:
    """True if the last scored token of a row is one of ``stops``; of an answer that was cut off it is not."""
    return next((label for label in reversed(row.labels) if label != IGNORE_INDEX), None) in stops


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """The answers of a batch, scored: chosen and rejected ones in turn, (2 P,) float32 each.

    Attributes:
        weighed: The same with the weights of ``ld_alpha``.
        aligned: Means over their tokens of log p_y - log sum_v p_v^2, without a gradient, where they are asked for:
            how likely an answer is for the model, as against one of its own.
        last: Log-probabilities of their last tokens alone, where they are asked for.
    """

    sums: Tensor
    weighed: Tensor
    aligned: Tensor | None = None
    last: Tensor | None = None


class AnswerScorer:
    """Lays pairs out and scores their answers, in one way for policy and reference, in float32.

    Args:
        ld_alpha: Weight of an answer's tokens beyond the length of the shorter one of its pair.
        sequence: This rank's part of each row, where ranks share rows.
    """

    def __init__(
        self,
        batches: Batches,
        pad_token_id: int,
        vocab_size: int,
        ld_alpha: float,
        sequence: SequencePart | None = None,
        pixels: PixelReader | None = None,
    ) -> None:
        self._pixels = pixels
        self._batches, self._pad_token_id = batches, pad_token_id
        self._vocab_size, self._ld_alpha, self._sequence = vocab_size, ld_alpha, sequence

    def batch(self, documents: Sequence[TokenizedRow]) -> dict[str, Tensor]:
        """Chosen and rejected rows in turn as a batch on the host: what the layers take, ``labels``, ``supervised``,
        and ``scored`` (2 P, longest answer) float32, the weight of each token that is scored.

        Pairs that share their prompts have ``targets`` in place of ``labels``: the tokens that the positions
        ``supervised`` predict. Both answers' first tokens are predicted by the last position of their prompt. Pairs of
        a batch with images do not.
        """
        if self._shares(documents):
            pairs = list(zip(documents[0::2], documents[1::2], strict=True))
            found, supervised, targets = shared_batch(pairs, self._batches, self._pad_token_id)
            target_positions(targets, self._vocab_size)
            found[TARGETS] = targets
        else:
            found = documents_batch(documents, self._batches, self._pad_token_id)
            found = with_images(found, [documents], self._pixels)
            supervised = supervised_positions(found[LABELS], self._vocab_size)
        found[SUPERVISED] = supervised
        found[SCORED] = self._weights([answer_tokens(document) for document in documents])
        return found if self._sequence is None else self._part_of(found, self._sequence)

    def _part_of(self, batch: dict[str, Tensor], sequence: SequencePart) -> dict[str, Tensor]:
        """This rank's part of a batch; the weights stay those of whole answers."""
        width = batch["input_ids"].shape[1]
        part = batch[SUPERVISED] % width // -(-width // sequence.parts)
        found = part_of(batch, sequence.part, sequence.parts)
        found[SUPERVISED] = target_positions(found[TARGETS].reshape(-1), self._vocab_size)
        scored = batch[SCORED] > 0
        here = torch.zeros_like(scored).masked_scatter(scored, part == sequence.part)
        return {**found, SCORED: batch[SCORED], HERE: here}

    def tokens(self, documents: Sequence[TokenizedRow]) -> int:
        """The tokens of these rows that are computed, without filler: those that a pair shares once."""
        if self._shares(documents):
            return int(lengths_once(documents).sum())
        return sum(len(document.input_ids) for document in documents)

    def _shares(self, documents: Sequence[TokenizedRow]) -> bool:
        return self._batches.shares_prompts and not any(one.images for one in documents)

    def _weights(self, sizes: Sequence[int]) -> Tensor:
        count = torch.tensor(sizes)[:, None]
        column = torch.arange(max(sizes))[None]
        if self._ld_alpha == 1:
            return (column < count).float()
        shorter = count.view(-1, 2).amin(1).repeat_interleave(2)[:, None]
        weights = torch.where(column < shorter, 1.0, self._ld_alpha)
        # A weight of 0 is a token that is scored all the same: the sums without weights count it.
        return torch.where(column < count, weights.clamp(min=torch.finfo(torch.float32).tiny), 0.0)

    def score(
        self,
        model: PreTrainedModel | PeftModel,
        inputs: dict[str, Tensor],
        stack: DecoderStack | None = None,
        *,
        aligned: bool = False,
        last: bool = False,
    ) -> ScoredAnswers:
        """The log-probabilities of a batch's answers under ``model``; no logits are made. Of rows that ranks share all
        of these have those of whole answers. ``aligned`` takes one product of the head more; ``last`` takes nothing.
        """
        layers = {name: value for name, value in inputs.items() if name not in _NOT_OF_LAYERS}
        weights, sequence = inputs[SCORED], self._sequence

        def log_probs(states: HiddenStates, temperature: float) -> Tensor:
            """(2 P, longest answer), 0 where nothing is scored here."""
            if LABELS not in inputs and sequence is None:
                targets = inputs[SUPERVISED], inputs[TARGETS]
                found = log_probs_at(states, head_of(model), *targets, temperature=temperature)
            else:
                found, _ = next_token_log_probs(
                    states,
                    head_of(model),
                    inputs[LABELS if sequence is None else TARGETS],
                    temperature=temperature,
                    supervised=inputs[SUPERVISED],
                    shifted=sequence is not None,
                )
            return torch.zeros_like(weights).masked_scatter(inputs.get(HERE, weights > 0), found)

        def sums() -> tuple[Tensor, ...]:
            states = hidden_states(model, layers, stack, sequence=sequence)
            by_answer = log_probs(states, 1.0)
            found = [by_answer.sum(1), (by_answer * weights).sum(1)]
            if last:
                found.append(by_answer.gather(1, (weights > 0).sum(1, keepdim=True) - 1)[:, 0])
            if aligned:
                # With L_T = log sum_v exp(z_v / T): log p_y - log sum_v p_v^2 is (2 z_y - L_{1/2}) - (z_y - L_1).
                with torch.no_grad():
                    found.append((log_probs(states, 0.5) - by_answer).sum(1))
            return tuple(found)

        found = within_root(model, sums)
        if sequence is not None:
            found = tuple(sequence.summed(torch.stack(found)))
        means = found[-1].detach() / (weights > 0).sum(1) if aligned else None
        return ScoredAnswers(found[0], found[1], means, found[2] if last else None)
