"""What metrics and held-out results of pairs are made of: sums over pairs, accuracy without the help of length, and
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


#: Numbers of :func:`pair_sums`.
PAIR_SUMS = 11


def pair_sums(answers: Answers, loss: PairLoss, weights: Tensor) -> Tensor:
    """(11,) float64: the sums over pairs that metrics are means of, as :func:`measures` names them.

    Rewards are beta times what the log-probability has gained over the reference. A pair is right whose chosen answer
    has the larger reward, a tie by one half; it has fallen where that answer has become less likely than under the
    reference. Answers are alike that differ by 10% in length at most.

    Args:
        weights: (P,), 0 for pairs that do not count.
    """
    one, other = shown_ratios(answers, loss)
    right = (one > other).float() + 0.5 * (one == other).float()
    shorter = torch.minimum(answers.chosen_tokens, answers.rejected_tokens)
    alike = ((answers.chosen_tokens - answers.rejected_tokens).abs() <= 0.1 * shorter).float()
    each = (
        torch.ones_like(one), loss.beta * one, loss.beta * other, right, (one < 0).float(),
        answers.chosen, answers.rejected, answers.chosen_tokens, answers.rejected_tokens, alike, alike * right,
    )  # fmt: skip
    return torch.stack([(value.detach() * weights).double().sum() for value in each])


def shown_ratios(answers: Answers, loss: PairLoss) -> tuple[Tensor, Tensor]:
    """What both answers have gained over the reference, (P,) each: of a token where the first loss compares that."""
    one, other = answers.chosen_ratio, answers.rejected_ratio
    return (one / answers.chosen_tokens, other / answers.rejected_tokens) if loss.averaged else (one, other)


def measures(sums: Sequence[float], *, compared: bool) -> dict[str, float]:
    """Means by name, of :func:`pair_sums`; ``compared``: there is a reference, than which answers can fall."""
    pairs, chosen, rejected, right, fell, chosen_logp, rejected_logp, ours, others, alike, alike_right = sums
    if not pairs:
        return {}
    return {
        "rewards/chosen": chosen / pairs,
        "rewards/rejected": rejected / pairs,
        "rewards/margins": (chosen - rejected) / pairs,
        "rewards/accuracies": right / pairs,
        "logps/chosen": chosen_logp / max(ours, 1.0),
        "logps/rejected": rejected_logp / max(others, 1.0),
        **({"chosen_fell": fell / pairs} if compared else {}),
        **({"rewards/accuracies_alike": alike_right / alike} if alike else {}),
    }


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
        stops: The tokens that end an answer.
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
