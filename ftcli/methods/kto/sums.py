"""What metrics and held-out results of labelled answers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ftcli.methods.kto.losses import LabelledAnswers


@dataclass(frozen=True, slots=True)
class LabelSums:
    """Sums over answers, in float64: what metrics are means of.

    Attributes:
        chosen, rejected: Wanted and unwanted answers.
        chosen_reward, rejected_reward: beta times what their log-probabilities have gained over the reference.
        rose, fell: Wanted answers that have become likelier, and unwanted ones that have become less likely, than under
            the reference; one that is as likely is one half.
        kl, steps: The KL of each step, and how many steps.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor
    rose: Tensor
    fell: Tensor
    chosen_logp: Tensor
    rejected_logp: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    kl: Tensor
    steps: Tensor

    @classmethod
    def of(cls, answers: LabelledAnswers, logp: Tensor, tokens: Tensor, beta: float) -> LabelSums:
        """Of a batch; ``logp`` and ``tokens`` (N,) are those of each answer under the policy."""
        wanted, unwanted = (answers.labels > 0).double(), (answers.labels < 0).double()
        gained, logp = answers.gained.detach(), logp.detach()
        right = (answers.labels * gained > 0).double() + 0.5 * (gained == 0).double()
        each = (torch.ones_like(gained), beta * gained, right, logp, tokens)
        none = torch.zeros((), dtype=torch.float64, device=gained.device)
        sums = [(value.double() * of).sum() for value in each for of in (wanted, unwanted)]
        return cls(*(*sums, none, none))

    @classmethod
    def of_step(cls, kl: Tensor) -> LabelSums:
        """Of a step's KL."""
        none = torch.zeros((), dtype=torch.float64, device=kl.device)
        return cls(*(*[none] * (SUMS - 2), kl.double(), none + 1))

    def vector(self) -> Tensor:
        """All of them, (12,)."""
        return torch.stack([getattr(self, field.name) for field in fields(self)])


#: How many numbers :class:`LabelSums` has.
SUMS = len(fields(LabelSums))


def measures(sums: Sequence[float], *, kl: bool) -> dict[str, float]:
    """Means by name, of :meth:`LabelSums.vector`: those of a label without an answer are left out. ``kl``: the loss
    needs it.
    """
    one, other, good, bad, rose, fell, logp, other_logp, tokens, other_tokens, divergence, steps = sums
    found: dict[str, float] = {}
    if one:
        found |= {"rewards/chosen": good / one, "logps/chosen": logp / max(tokens, 1.0), "chosen_rose": rose / one}
    if other:
        found |= {"rewards/rejected": bad / other, "logps/rejected": other_logp / max(other_tokens, 1.0)}
        found |= {"rejected_fell": fell / other}
    if one and other:
        found["rewards/margins"] = good / one - bad / other
        found["rewards/accuracies"] = (rose + fell) / (one + other)
    return {**found, "kl": divergence / steps} if kl and steps else found
