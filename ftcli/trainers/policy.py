"""The training passes of GRPO: TRL's loss on log-probabilities that our layers and our head compute.

TRL asks for log-probabilities of completions that are padded on the right, after prompts that are padded on the left.
Here each prompt with its completion is a document, and documents are laid out as those of supervised training are.
TRL's loss, in all its types, then works on what it asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.data.collate import PaddingCollator, Unpadded, unpadded_batch
from ftcli.data.tokens import TokenizedRow
from ftcli.facts.batches import Batches
from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import head_of, hidden_states
from ftcli.model.loss import next_token_log_probs, supervised_positions
from ftcli.rows.row import Row

if TYPE_CHECKING:
    from collections import defaultdict

    from ftcli.model.stack import DecoderStack
    from ftcli.trainers.spans import Spans


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
        """Of TRL's batch, on the host.

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

    def batch(self, batches: Batches, pad_token_id: int) -> dict[str, Tensor]:
        """``input_ids`` and ``labels`` of shape (rows, tokens), and what else says how documents are laid out."""
        if batches.layout == "unpadded":
            batch = unpadded_batch(self.documents, pad_token_id)
            return {name: value for name, value in batch.items() if name != "lengths"}
        rows: list[Unpadded] = [{"input_ids": d.input_ids, "labels": d.labels} for d in self.documents]
        batch = PaddingCollator(pad_token_id)(rows)
        # Padded on the right, nothing that is scored sees the padding under causal attention.
        return {name: value for name, value in batch.items() if name != "attention_mask"}


class PolicyMixin:
    """Mixed into TRL's GRPOTrainer, before it in the method resolution order.

    Rows whose advantage is zero have no part in the gradient, where nothing but advantages moves the model. They cost
    no pass; TRL's numbers are those of a pass over all rows.
    """

    batches: Batches
    stack: DecoderStack | None
    spans: Spans
    pad_token_id: int
    temperature: float
    beta: float
    _entropy_bonus_enabled: bool
    _metrics: dict[str, defaultdict[str, list[float]]]
    _silent: tuple[bool, ...] | None = None
    _skipped_values: Tensor | None = None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        self._silent, self._skipped_values = self._without_part(inputs), inputs.get("old_per_token_logps")
        try:
            loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
            self._correct_entropy(inputs["completion_mask"])
        finally:
            self._silent = self._skipped_values = None
        return loss

    def _without_part(self, inputs: dict[str, Tensor]) -> tuple[bool, ...] | None:
        """Which rows bear no gradient; None where each of them does."""
        if self.beta or self._entropy_bonus_enabled or not torch.is_grad_enabled():
            return None
        silent = (inputs["advantages"] == 0).tolist()
        return tuple(silent) if any(silent) else None

    def _correct_entropy(self, completion_mask: Tensor) -> None:
        """TRL's mean over all tokens counts those of rows that were left out as 0; theirs is not known. A micro-batch
        may have no tokens at all, where completions that were cut off are masked: its mean stays TRL's, 0.
        """
        if self._silent is None:
            return
        entropies = self._metrics["train" if self.model.training else "eval"]["entropy"]  # type: ignore[attr-defined]
        tokens = completion_mask.sum(1).tolist()
        scored = sum(count for count, silent in zip(tokens, self._silent, strict=True) if not silent)
        if scored:
            entropies[-1] *= sum(tokens) / scored
        elif any(tokens):
            entropies.pop()

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **_images: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """TRL's hook: log-probabilities and entropies of completions, (B, C) each, 0 where there is no token.

        Args:
            input_ids, attention_mask: (B, P + C), as TRL pads them.
            logits_to_keep: C.
            batch_size: Rows that are computed at a time.
        """
        rows = input_ids.shape[0]
        size = batch_size or rows
        ids, mask = input_ids.cpu(), attention_mask.cpu()
        silent = self._silent or (False,) * rows
        found = [
            self._scores(
                model,
                ScoredDocuments.of(ids[at : at + size], mask[at : at + size], logits_to_keep, silent[at : at + size]),
            )
            for at in range(0, rows, size)
        ]
        log_probs, entropies = (torch.cat(parts) for parts in zip(*found, strict=True))
        if self._silent is not None and self._skipped_values is not None:
            left_out = torch.tensor(self._silent, device=log_probs.device)[:, None]
            log_probs = torch.where(left_out, self._skipped_values, log_probs)  # ratios of 1
        return log_probs, entropies if compute_entropy else None, None

    def _scores(self, model: nn.Module, scored: ScoredDocuments) -> tuple[Tensor, Tensor]:
        """(B, C) each."""
        unwrapped = self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]
        device = self.accelerator.device  # type: ignore[attr-defined]
        where = scored.where.to(device, non_blocking=True)
        nothing = torch.zeros(where.shape, dtype=torch.float32, device=device)
        if not scored.documents:
            return nothing + _zero_of(unwrapped), nothing
        if torch.is_grad_enabled():
            self.spans.count("training", sum(len(one.input_ids) for one in scored.documents))
        batch = scored.batch(self.batches, self.pad_token_id)
        head = head_of(unwrapped)
        supervised = supervised_positions(batch["labels"], head.weight.shape[0]).to(device, non_blocking=True)
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        labels = batch.pop("labels")
        stack = self.stack if torch.is_grad_enabled() else None  # a graph's adapters cannot be switched off
        states = hidden_states(unwrapped, batch, stack)
        log_probs, entropies = next_token_log_probs(
            states,
            head,
            labels,
            temperature=self.temperature,
            supervised=supervised,
            entropy_gradient=self._entropy_bonus_enabled,
        )
        return nothing.masked_scatter(where, log_probs), nothing.masked_scatter(where, entropies)


def _zero_of(model: nn.Module) -> Tensor | float:
    """A zero whose gradient is zero for all that is trained, so that the optimizer's step is what it would be."""
    if not torch.is_grad_enabled():
        return 0.0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.stack([parameter.reshape(-1)[:1].sum().float() * 0.0 for parameter in trained]).sum()
