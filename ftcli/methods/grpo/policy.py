"""Log-probabilities of completions under a policy, out of our layers and our head.

A batch holds completions that are padded on the right, after prompts that are padded on the left. Here each prompt with
its completion is a document, and documents are laid out as those of supervised training are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from ftcli.data.collate import documents_batch
from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX
from ftcli.methods.grpo.losses import Completions, StepShape, policy_loss
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.grpo.spans import TRAINING
from ftcli.model.backbone import head_of, hidden_states
from ftcli.model.loss import next_token_log_probs, supervised_positions
from ftcli.plan.batches import Batches
from ftcli.rows.row import Row

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.methods.grpo.spans import Spans
    from ftcli.model.fused import DecoderStack


#: Numbers by name, one for each micro-batch.
Metrics: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """Prompts with completions as documents, on the host.

    Attributes:
        documents: Those that have a token to be scored; their labels are the completions.
        where: (B, C) bool, True for each token that is scored; in its order the documents' labels.
    """

    documents: list[TokenizedRow]
    where: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor, completion: int, silent: Sequence[bool]) -> ScoredDocuments:
        """Of a batch on the host.

        Args:
            input_ids, attention_mask: (B, P + C); the last ``completion`` columns, C, are the completions.
            silent: For each row whether it is left out.
        """
        documents: list[TokenizedRow] = []
        where = attention_mask[:, -completion:].bool()
        for index, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            prompt, answer = ids[:-completion][mask[:-completion]], ids[-completion:][where[index]]
            if not len(prompt):
                where[index, :1] = False  # nothing stands before it that could predict it
            if silent[index] or not where[index].any():
                where[index] = False
                continue
            labels = [IGNORE_INDEX] * len(prompt) + answer.tolist()
            documents.append(TokenizedRow(Row("completions", index, {}), [*prompt.tolist(), *answer.tolist()], labels))
        return cls(documents, where)


class PolicyScores:
    """Scores completions under the policy as it is, or under its reference.

    Args:
        stack: The decoder layers as one function, which passes with gradients take; None where they are not.
        spans: Counts the tokens of passes with gradients.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        batches: Batches,
        *,
        pad_token_id: int,
        temperature: float,
        device: torch.device,
        stack: DecoderStack | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.model, self.batches, self.temperature, self.device = model, batches, temperature, device
        self._pad_token_id, self._stack, self._spans = pad_token_id, stack, spans

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        completion: int,
        *,
        rows_at_a_time: int | None = None,
        silent: Sequence[bool] | None = None,
        model: PreTrainedModel | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of completions in nats, (B, C) float32 each, 0 where there is no token.

        Args:
            input_ids, attention_mask: (B, P + C); the last ``completion`` columns, C, are the completions.
            silent: Rows that are left out, with zeros.
            model: Another model than the policy.
        """
        rows = input_ids.shape[0]
        size = rows_at_a_time or rows
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        silent = silent or (False,) * rows
        scored_by = self.model if model is None else model
        found = [
            self._scores(
                scored_by,
                ScoredDocuments.of(ids[at : at + size], mask[at : at + size], completion, silent[at : at + size]),
            )
            for at in range(0, rows, size)
        ]
        log_probs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
        return log_probs, entropies

    def _scores(self, model: PreTrainedModel | PeftModel, scored: ScoredDocuments) -> tuple[Tensor, Tensor]:
        """(B, C) each."""
        where = scored.where.to(self.device, non_blocking=True)
        nothing = torch.zeros(where.shape, dtype=torch.float32, device=self.device)
        if not scored.documents:
            return nothing + _zero_of(model), nothing
        if torch.is_grad_enabled() and self._spans is not None:
            self._spans.count(TRAINING, sum(len(one.input_ids) for one in scored.documents))
        batch = documents_batch(scored.documents, self.batches, self._pad_token_id)
        head = head_of(model)
        supervised = supervised_positions(batch["labels"], head.weight.shape[0]).to(self.device, non_blocking=True)
        batch = {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
        labels = batch.pop("labels")
        stack = self._stack if torch.is_grad_enabled() else None  # a graph's adapters cannot be switched off
        states = hidden_states(model, batch, stack)
        log_probs, entropies = next_token_log_probs(
            states, head, labels, temperature=self.temperature, supervised=supervised
        )
        return nothing.masked_scatter(where, log_probs), nothing.masked_scatter(where, entropies)


def scored_loss(
    policy: PolicyScores, grpo: GrpoConfig, inputs: Completions, shape: StepShape
) -> tuple[Tensor, Metrics]:
    """The policy's loss on a micro-batch, and its metrics.

    Rows whose advantage is zero have no part in the gradient, where nothing but advantages moves the model. They cost
    no pass, and the mean entropy is that of the other rows.
    """
    silent = _without_part(inputs["advantages"], grpo.beta)
    ids, mask = joined(inputs)
    log_probs, entropies = policy.log_probs(ids, mask, inputs["completion_ids"].shape[1], silent=silent)
    if silent is not None and "old_per_token_logps" in inputs:  # ratios of 1
        left_out = torch.tensor(silent, device=log_probs.device)[:, None]
        log_probs = torch.where(left_out, inputs["old_per_token_logps"], log_probs)
    found = policy_loss(grpo, inputs, log_probs, entropies, shape)
    values = torch.stack(list(found.metrics.values())).tolist()
    metrics = {name: [value] for name, value in zip(found.metrics, values, strict=True)}
    if silent is not None:
        metrics["entropy"] = _entropy_of_scored(metrics["entropy"][0], inputs, silent)
    return found.loss, metrics


def _without_part(advantages: Tensor, beta: float) -> tuple[bool, ...] | None:
    """Which rows bear no gradient; None where each of them does."""
    if beta:
        return None
    silent = (advantages == 0).tolist()
    return tuple(silent) if any(silent) else None


def _entropy_of_scored(mean: float, inputs: Completions, silent: Sequence[bool]) -> list[float]:
    """The mean over rows that were scored, from that over all, in which the others count as 0; nothing where no row was
    scored. A micro-batch may have no tokens at all, where completions that were cut off are masked: its mean is 0.
    """
    tokens = inputs["completion_mask"].sum(1).tolist()
    scored = sum(count for count, left_out in zip(tokens, silent, strict=True) if not left_out)
    if scored:
        return [mean * sum(tokens) / scored]
    return [] if any(tokens) else [mean]


def joined(batch: Completions) -> tuple[Tensor, Tensor]:
    """(B, P + C): ids and mask of prompts with their completions."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)


def _zero_of(model: nn.Module) -> Tensor | float:
    """A zero loss that touches every trained parameter, so that gradients are 0 and not None."""
    if not torch.is_grad_enabled():
        return 0.0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([parameter.reshape(-1)[:1].sum().float() * 0.0 for parameter in trained]).sum()
