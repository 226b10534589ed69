"""The loss of next tokens, and their log-probabilities, from hidden states: never with all logits at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from ftkernels.linear_cross_entropy import labelled_rows, linear_cross_entropy
from ftkernels.linear_divergence import Divergence, LinearHead, TopLogProbs, linear_divergence
from ftkernels.linear_log_prob import linear_log_prob
from torch import Tensor, nn

from ftcli.labels import IGNORE_INDEX
from ftcli.model.backbone import Head, HiddenStates, head_of, hidden_states, within_root

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ftcli.model.fused import DecoderStack
    from ftcli.model.routing import RouterBalance
    from ftcli.model.sequence_parallel import SequencePart


#: Where a batch holds the positions that bear loss, if it does: :func:`supervised_positions`.
SUPERVISED = "supervised"


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Over supervised tokens: ``loss`` in nats (over ``num_items`` when given), top-1 ``correct``, ``count``."""

    loss: Tensor
    correct: Tensor | None
    count: Tensor


def next_tokens(labels: Tensor) -> Tensor:
    """(B, S) labels -> (B * S,) int64: for each position the label of the next one, -100 for the last of a row."""
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).reshape(-1)


def supervised_positions(labels: Tensor, vocab_size: int) -> Tensor:
    """(R,) int64, the positions in ``next_tokens(labels)`` that bear loss. Ask where ``labels`` lie on the host.

    Raises ValueError for a label outside the vocabulary.
    """
    return target_positions(next_tokens(labels), vocab_size)


def target_positions(targets: Tensor, vocab_size: int) -> Tensor:
    """Positions that bear loss in ``targets``, the output of :func:`next_tokens`."""
    return labelled_rows(targets, IGNORE_INDEX, vocab_size)


def next_token_loss(
    hidden: HiddenStates,
    head: Head,
    labels: Tensor,
    *,
    num_items: Tensor | int | None = None,
    supervised: Tensor | None = None,
    shifted: bool = False,
) -> TokenLoss:
    """Cross-entropy of each next token, summed over ``labels != -100`` and divided by ``num_items`` when given.

    Args:
        labels: (batch, seq_len) int64; position t is predicted from position t-1, or from t itself where ``shifted``.
        num_items: Supervised tokens of the whole accumulated batch, so that any split of it gives the same loss.
        supervised: What :func:`supervised_positions` gives for ``labels``, where it is known already.

    Raises:
        TypeError: When hidden states and head do not fit: what was passed is not hidden states.
    """
    targets = labels.reshape(-1) if shifted else next_tokens(labels)
    loss, correct = linear_cross_entropy(
        _rows_for(hidden, head, labels),
        head.weight,
        targets,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        ignore_index=IGNORE_INDEX,
        num_items=num_items,
        reduction="sum" if num_items is None else "mean",
        with_accuracy=True,
        rows=supervised,
        handed=head.handed,
        large_chunks=not head.is_sharded,
        head_rows=head.rows,
    )
    return TokenLoss(loss=loss, correct=correct, count=(targets != IGNORE_INDEX).sum())


def next_token_log_probs(
    hidden: HiddenStates,
    head: Head,
    labels: Tensor,
    *,
    temperature: float,
    supervised: Tensor | None = None,
    entropy_gradient: bool = False,
    shifted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token with a label at a temperature, and the entropy that it was taken from, in nats.

    Args:
        labels, supervised, shifted: As :func:`next_token_loss`.
        entropy_gradient: The loss uses the entropy, too.

    Returns:
        (R,) float32 each, R the supervised tokens in their order.

    Raises:
        TypeError: As :func:`next_token_loss`.
    """
    rows = _rows_for(hidden, head, labels)
    targets = labels.reshape(-1) if shifted else next_tokens(labels)
    if supervised is None:
        supervised = target_positions(targets, head.weight.shape[0])
    log_probs, entropies = linear_log_prob(
        rows,
        head.weight,
        targets,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        temperature=temperature,
        ignore_index=IGNORE_INDEX,
        entropy_gradient=entropy_gradient,
        rows=supervised,
    )
    return log_probs[supervised], entropies[supervised]


def log_probs_at(hidden: HiddenStates, head: Head, positions: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """Log-probability of token ``targets[i]`` after the hidden state of ``positions[i]``, (R,) float32, in nats.

    Args:
        positions: (R,) int64 into the (batch * seq_len) hidden states. Each is there twice at most: then the sum of
            its gradients is the same in whichever order they come.
        targets: (R,) int64, within the vocabulary.

    Raises:
        TypeError: As :func:`next_token_loss`.
    """
    states = _states_for(hidden, head)
    rows = states.reshape(-1, states.shape[-1]).index_select(0, positions)
    log_probs, _ = linear_log_prob(
        rows,
        head.weight,
        targets,
        bias=head.bias,
        softcap=head.softcap,
        logit_scale=head.logit_scale,
        temperature=temperature,
        ignore_index=IGNORE_INDEX,
        rows=torch.arange(targets.shape[0], device=targets.device),
    )
    return log_probs


def next_token_divergence(
    student: tuple[Tensor, Head],
    teacher: tuple[Tensor, Head] | TopLogProbs,
    weights: Tensor,
    *,
    beta: float,
    temperature: float,
) -> Divergence:
    """The weighted divergence of the student's next-token distribution from the teacher's
    (:func:`ftkernels.linear_divergence.linear_divergence`).

    Args:
        student, teacher: (R, hidden size) hidden states (:meth:`HiddenStates.rows`) and the head of each; or what is
            known of the teacher's likeliest tokens at this temperature.
        weights: (R,) float32.
    """
    theirs = teacher if isinstance(teacher, TopLogProbs) else _linear(*teacher)
    return linear_divergence(_linear(*student), theirs, weights, beta=beta, temperature=temperature)


def _linear(rows: Tensor, head: Head) -> LinearHead:
    return LinearHead(rows, head.weight, head.bias, head.softcap, head.logit_scale)


def _rows_for(hidden: HiddenStates, head: Head, labels: Tensor) -> Tensor:
    """(batch * seq_len, hidden_size). Raises TypeError where these are not hidden states for this head and labels."""
    states = _states_for(hidden, head)
    if states.shape[:2] != labels.shape:
        raise TypeError(f"hidden states {tuple(states.shape)} and labels {tuple(labels.shape)} differ in length")
    return states.reshape(-1, states.shape[-1])


def _states_for(hidden: HiddenStates, head: Head) -> Tensor:
    states = hidden.tensor
    if states.shape[-1] != head.weight.shape[1]:
        raise TypeError(
            f"hidden states of width {states.shape[-1]} do not fit a head of width {head.weight.shape[1]}: "
            "logits were passed where hidden states are meant"
        )
    return states


def forward_loss(
    model: PreTrainedModel | PeftModel,
    batch: dict[str, Tensor],
    *,
    num_items: Tensor | int | None = None,
    stack: DecoderStack | None = None,
    sequence: SequencePart | None = None,
    balance: RouterBalance | None = None,
) -> TokenLoss:
    """Loss of one batch of ``input_ids`` and ``labels`` of shape (batch, seq_len), padded on the right or not at all,
    and optionally ``supervised`` (:func:`supervised_positions`). Where ranks share rows, of this rank's ``sequence``
    part of it (:func:`ftcli.data.collate.part_of`), which holds ``targets`` in place of ``labels``. With ``balance``
    the routers' auxiliary loss is added, by the batch's share of ``num_items``.

    No padding mask is given to the model: under causal attention a token sees only what stands before it, so padding
    at the end changes nothing that is supervised, and attention stays dense (its fastest form).
    """
    not_for_layers = ("labels", "targets", "attention_mask", SUPERVISED)
    inputs = {key: value for key, value in batch.items() if key not in not_for_layers}
    supervised = batch.get(SUPERVISED)
    if sequence is None:
        return loss_of(
            model, inputs, batch["labels"], num_items=num_items, supervised=supervised, stack=stack, balance=balance
        )

    def of_part() -> TokenLoss:
        states, head = hidden_states(model, inputs, stack, sequence=sequence), head_of(model)
        return next_token_loss(states, head, batch["targets"], num_items=num_items, supervised=supervised, shifted=True)

    return _loss_within_root(model, of_part)


def loss_of(
    model: PreTrainedModel | PeftModel,
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    num_items: Tensor | int | None = None,
    supervised: Tensor | None = None,
    stack: DecoderStack | None = None,
    balance: RouterBalance | None = None,
) -> TokenLoss:
    """:func:`next_token_loss` of the :func:`hidden_states` of ``inputs``, and what ``balance`` adds."""

    def of_all() -> TokenLoss:
        states = hidden_states(model, inputs, stack)
        states, added = (states, None) if balance is None else balance.closed(states)
        found = next_token_loss(states, head_of(model), labels, num_items=num_items, supervised=supervised)
        if added is None:
            return found
        return replace(found, loss=found.loss + added * (found.count if num_items is None else found.count / num_items))

    return _loss_within_root(model, of_all)


def _loss_within_root(model: PreTrainedModel | PeftModel, compute: Callable[[], TokenLoss]) -> TokenLoss:
    def parts() -> tuple[Tensor, Tensor | None, Tensor]:  # torch looks for tensors in tuples alone
        found = compute()
        return found.loss, found.correct, found.count

    return TokenLoss(*within_root(model, parts))
