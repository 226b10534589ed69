"""Losses of labelled answers, from the log-probabilities of each: code of :mod:`ftcli.tables.preference_losses`.

Notation: r the log-probability that an answer has gained over the reference, summed over its tokens; y its label, 1 or
-1; z the KL of policy and reference; w the weight of the label; s the logistic function. Every loss is one value an
answer, (N,) float32, to be minimised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ftcli.methods.preference.choice import beta_of, losses_of
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
    """What a loss reads of the section ``preference``."""

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
        """Of a recipe's section."""
        asked = settings or PreferenceConfig()
        ((name, _),) = losses_of("kto", asked)
        weighed = LabelSettings(beta_of(name, asked), asked.desirable_weight, asked.undesirable_weight)
        return cls(name, weighed, asked.sft_weight, asked.kl_rows)

    @property
    def beta(self) -> float:
        """The scale of rewards."""
        return self.settings.beta

    @property
    def estimates_kl(self) -> bool:
        """Whether it needs the KL of the step."""
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
