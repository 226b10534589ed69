"""Metrics and held-out results of pairs: sums over pairs, accuracy without the help of length, and
whether answers still end.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ftcli.data.tokens import TokenizedRow
from ftcli.errors import Finding
from ftcli.evaluate.margins import Floats, length_controlled
from ftcli.methods.preference.losses import Answers, PairLoss
from ftcli.methods.preference.pairs import ends_at

#: Nats by which the stop token's log-probability may fall: to half the probability (docs/preference.md has what
#: becomes of answers beyond it).
_FALLEN = math.log(2)


#: What held-out results call the numbers of metrics.
_HELD_OUT = {
    "rewards/accuracies": "accuracy",
    "rewards/accuracies_alike": "accuracy_of_like_length",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "logps/chosen": "chosen_logp",
    "logps/rejected": "rejected_logp",
    "chosen_fell": "chosen_fell",
    "chosen_rose": "chosen_rose",
    "rejected_fell": "rejected_fell",
    "kl": "kl",
}
#: Numbers of :func:`order_sums`, and of :func:`pair_sums`.
ORDER_SUMS, PAIR_SUMS = 6, 11


def held_out_names(found: Mapping[str, float]) -> dict[str, float]:
    """Numbers of metrics as held-out results have them."""
    return {ours: found[name] for name, ours in _HELD_OUT.items() if name in found}


def order_sums(
    one: Tensor, other: Tensor, lengths: tuple[Tensor, Tensor], weights: Tensor, *, scale: float = 1.0
) -> Tensor:
    """(6,) float64: the sums over pairs that metrics of their order are means of, as :func:`order_measures` names them.

    A pair is right whose chosen answer has more, a tie by one half. Answers are alike that differ by 10% in length at
    most.

    Args:
        one, other: What chosen and rejected answers have, (P,); rewards are ``scale`` times that.
        lengths: Tokens of both answers, (P,) each.
        weights: (P,), 0 for pairs that do not count.
    """
    right = (one > other).float() + 0.5 * (one == other).float()
    alike = ((lengths[0] - lengths[1]).abs() <= 0.1 * torch.minimum(*lengths)).float()
    return _summed((torch.ones_like(one), scale * one, scale * other, right, alike, alike * right), weights)


def order_measures(sums: Sequence[float]) -> dict[str, float]:
    """Means by name, of :func:`order_sums`."""
    pairs, one, other, right, alike, alike_right = sums
    if not pairs:
        return {}
    return {
        "rewards/chosen": one / pairs,
        "rewards/rejected": other / pairs,
        "rewards/margins": (one - other) / pairs,
        "rewards/accuracies": right / pairs,
        **({"rewards/accuracies_alike": alike_right / alike} if alike else {}),
    }


def pair_sums(answers: Answers, loss: PairLoss, weights: Tensor) -> Tensor:
    """(11,) float64: those of :func:`order_sums`, and five more that :func:`measures` names.

    Rewards are beta times what the log-probability has gained over the reference. A pair has fallen where its chosen
    answer has become less likely than under the reference.

    Args:
        weights: (P,), 0 for pairs that do not count.
    """
    one, other = shown_ratios(answers, loss)
    lengths = answers.chosen_tokens, answers.rejected_tokens
    each = ((one < 0).float(), answers.chosen, answers.rejected, *lengths)
    return torch.cat([order_sums(one, other, lengths, weights, scale=loss.beta), _summed(each, weights)])


def _summed(each: Sequence[Tensor], weights: Tensor) -> Tensor:
    return torch.stack([(value.detach() * weights).double().sum() for value in each])


def shown_ratios(answers: Answers, loss: PairLoss) -> tuple[Tensor, Tensor]:
    """Gains of both answers over the reference, (P,) each: of a token where the first loss compares that."""
    one, other = answers.chosen_ratio, answers.rejected_ratio
    return (one / answers.chosen_tokens, other / answers.rejected_tokens) if loss.averaged else (one, other)


def measures(sums: Sequence[float], *, compared: bool) -> dict[str, float]:
    """Means by name, of :func:`pair_sums`; ``compared``: there is a reference, than which answers can fall."""
    fell, chosen, rejected, ours, others = sums[ORDER_SUMS:]
    pairs, found = sums[0], order_measures(sums[:ORDER_SUMS])
    if not pairs:
        return found
    found |= {"logps/chosen": chosen / max(ours, 1.0), "logps/rejected": rejected / max(others, 1.0)}
    return {**found, "chosen_fell": fell / pairs} if compared else found


def margins_of(answers: Answers, loss: PairLoss) -> Tensor:
    """The margin of each pair, (P,) float64: of ``rewards/margins`` the mean is logged."""
    one, other = shown_ratios(answers, loss)
    return loss.beta * (one.double() - other.double())


def controlled(margins: Floats, lengths: Floats) -> dict[str, float]:
    """The length-controlled accuracy of pairs, where there is one."""
    found = length_controlled(margins, lengths)
    return {} if found is None else {"accuracy_length_controlled": found}


def stop_columns(
    rows: Sequence[TokenizedRow], stops: Container[int], policy: Tensor, reference: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of each row's last token its log-probability, and by how much that exceeds the reference's; NaN where an answer
    was cut off, or nothing is known of the reference.

    Args:
        policy, reference: Log-probabilities of the rows' last tokens, (R,).
    """
    ends = torch.tensor([ends_at(row, stops) for row in rows], device=policy.device)
    unknown = torch.full_like(policy, torch.nan)
    change = unknown if reference is None else policy - reference
    return torch.where(ends, policy, unknown), torch.where(ends, change, unknown)


def stop_measures(columns: Floats) -> dict[str, float]:
    """Means of :func:`stop_columns` (R, 2) over the rows that have them."""
    found = {}
    for name, column in zip(("stop_logp", "stop_change"), columns.T, strict=True):
        known = column[~np.isnan(column)]
        if len(known):
            found[name] = float(known.mean())
    return found


def stop_findings(before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[Finding]:
    """FT717, a warning, where a model has forgotten to stop.

    Args:
        before, after: Held-out measures by name. What was measured before training counts where the reference is not
            known.
    """
    change = after.get("stop_change")
    if change is None and "stop_logp" in before and "stop_logp" in after:
        change = after["stop_logp"] - before["stop_logp"]
    if change is not None and change < -_FALLEN:
        yield Finding(
            "FT717",
            f"after held-out chosen answers the stop token has lost {-change:.2g} nats: {math.exp(change):.2%} of its "
            "probability are left, and answers may not end by themselves",
            help="lower train.learning_rate, train fewer steps, or set preference.sft_weight (docs/preference.md)",
            severity="warning",
        )
