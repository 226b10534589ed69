"""Losses of labelled answers, from the log-probabilities of each (code of :mod:`ftcli.tables.preference_losses`), and
the sums that metrics and held-out results are means of.

Notation: r the log-probability that an answer has gained over the reference, summed over its tokens; y its label, 1 or
-1; z the KL of policy and reference; w the weight of the label; s the logistic function. Every loss is one value an
answer, (N,) float32, to be minimised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftcli.methods.preference.checks import beta_of, losses_of
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.tables import code_of, preference_losses


@dataclass(frozen=True, slots=True)
class LabelledAnswers:
    """N answers with their labels, (N,) float32 each, and the step's KL.

    Attributes:
        gained: Nats that each answer has gained over the reference (r).
        labels: 1 or -1 (y); 0 for what stands for no answer, and has no loss.
        kl: Nats, a scalar that no gradient goes through (z); 0 for a loss that needs none.
    """

    gained: Tensor
    labels: Tensor
    kl: Tensor


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """A loss's settings, of the section ``preference``."""

    beta: float
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class LabelLoss:
    """The recipe's loss, all settled.

    Attributes:
        kl_rows: Mismatched rows a step; None: as many as it has rows.
    """

    name: str
    settings: LabelSettings
    sft_weight: float = 0.0
    kl_rows: int | None = None

    @classmethod
    def of(cls, settings: PreferenceConfig | None) -> LabelLoss:
        asked = settings or PreferenceConfig()
        ((name, _),) = losses_of("kto", asked)
        weighed = LabelSettings(beta_of(name, asked), asked.desirable_weight, asked.undesirable_weight)
        return cls(name, weighed, asked.sft_weight, asked.kl_rows)

    @property
    def beta(self) -> float:
        return self.settings.beta

    @property
    def estimates_kl(self) -> bool:
        return preference_losses.row(self.name).estimates_kl

    def values(self, answers: LabelledAnswers) -> Tensor:
        """One value an answer; without the cross-entropy of ``sft_weight``."""
        found: Tensor = code_of(preference_losses.row(self.name).code)(answers, self.settings)
        return found


def kto(answers: LabelledAnswers, how: LabelSettings) -> Tensor:
    """w (1 - s(beta y (r - z)))."""
    return _weights(answers, how) * torch.sigmoid(-how.beta * answers.labels * (answers.gained - answers.kl))


def apo_zero_unpaired(answers: LabelledAnswers, how: LabelSettings) -> Tensor:
    """w (1 - s(beta y r)): a good answer is to become likelier than under the reference, a bad one less likely."""
    return _weights(answers, how) * torch.sigmoid(-how.beta * answers.labels * answers.gained)


def _weights(answers: LabelledAnswers, how: LabelSettings) -> Tensor:
    """w of each answer, 0 without a label."""
    wanted, unwanted = (answers.labels > 0).float(), (answers.labels < 0).float()
    return how.desirable_weight * wanted + how.undesirable_weight * unwanted


#: Numbers of :func:`label_sums`.
LABEL_SUMS = 12


def label_sums(answers: LabelledAnswers, logp: Tensor, tokens: Tensor, beta: float) -> Tensor:
    """(12,) float64: the sums over answers that metrics are means of, as :func:`measures` names them; those of the step
    are 0.

    Rewards are beta times what log-probabilities have gained over the reference. Wanted answers have risen that became
    likelier than under the reference, unwanted ones fallen that became less likely; one that is as likely has by one
    half.

    Args:
        logp, tokens: (N,), those of each answer under the policy.
    """
    wanted, unwanted = (answers.labels > 0).double(), (answers.labels < 0).double()
    gained, logp = answers.gained.detach(), logp.detach()
    right = (answers.labels * gained > 0).double() + 0.5 * (gained == 0).double()
    each = (torch.ones_like(gained), beta * gained, right, logp, tokens)
    none = torch.zeros((), dtype=torch.float64, device=gained.device)
    return torch.stack([*((value.double() * of).sum() for value in each for of in (wanted, unwanted)), none, none])


def step_sums(kl: Tensor) -> Tensor:
    """(12,): those of a step, its KL and 1."""
    found = torch.zeros(LABEL_SUMS, dtype=torch.float64, device=kl.device)
    found[-2], found[-1] = kl.double(), 1.0
    return found


def measures(sums: Sequence[float], *, kl: bool) -> dict[str, float]:
    """Means by name, of :func:`label_sums`: those of a label without an answer are left out. ``kl``: the loss
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
