"""Losses of pairs of answers, from four log-probabilities each: the code of :mod:`ftcli.tables.preference_losses`.

Notation: w the chosen answer, l the rejected one; logp the sum of the log-probabilities of an answer's tokens under the
policy, n the number of these; r = logp - logp of the reference (logp itself without one); D = r_w - r_l; s the logistic
function. Every loss is one value a pair, (P,) float32, to be minimised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ftcli.methods.preference.checks import beta_of, compares, losses_of
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.tables import code_of, preference_losses

#: Temperature between the logistic and the exponential loss (Lu et al. 2024, the value they found).
_DISCOPOP_TAU = 0.05


@dataclass(frozen=True, slots=True)
class Answers:
    """The log-probabilities of P pairs in nats, (P,) float32 each.

    Attributes:
        chosen, rejected: Under the policy, summed over each answer's tokens.
        ref_chosen, ref_rejected: Under the reference; zeros without one.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """r_w."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """r_l."""
        return self.rejected - self.ref_rejected

    @property
    def difference(self) -> Tensor:
        """D."""
        return self.chosen_ratio - self.rejected_ratio

    @property
    def mean_difference(self) -> Tensor:
        """r_w / n_w - r_l / n_l."""
        return self.chosen_ratio / self.chosen_tokens - self.rejected_ratio / self.rejected_tokens


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss's settings, of the section ``preference``."""

    beta: float
    gamma: float = 0.5
    smoothing: float = 0.0


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The recipe's losses with their weights, all settled.

    Attributes:
        sft_weight: Of the mean cross-entropy of the chosen answers' tokens.
        ld_alpha: Weight of tokens beyond the length of the shorter answer.
        weighs: Whether pairs are weighed by the policy (:func:`policy_weights`).
    """

    parts: tuple[tuple[str, float, LossSettings], ...]
    sft_weight: float
    ld_alpha: float
    reference: bool
    weighs: bool = False

    @classmethod
    def of(cls, method: str, settings: PreferenceConfig | None) -> PairLoss:
        """The loss of a recipe's ``train.method`` and section. Preflight has refused a loss whose beta has to be
        written.
        """
        asked = settings or PreferenceConfig()
        parts = tuple(
            (name, weight, LossSettings(beta_of(name, asked), asked.gamma, asked.label_smoothing))
            for name, weight in losses_of(method, asked)
        )
        return cls(parts, asked.sft_weight, asked.ld_alpha, compares(method, asked), asked.use_weighting)

    def values(self, answers: Answers) -> Tensor:
        """The weighted sum of the losses, one value a pair; without the cross-entropy of ``sft_weight``."""
        found = [weight * code_of(preference_losses.row(name).code)(answers, how) for name, weight, how in self.parts]
        total: Tensor = torch.stack(found).sum(0)
        return total

    def weighed_values(self, answers: Answers, aligned: Tensor | None) -> Tensor:
        """:meth:`values`, each times the weight of its pair where pairs are weighed."""
        found = self.values(answers)
        return found if aligned is None else found * policy_weights(aligned)

    @property
    def beta(self) -> float:
        """The scale of the rewards that are shown: that of the first loss."""
        return self.parts[0][2].beta

    @property
    def averaged(self) -> bool:
        """True if the rewards that are shown are of nats a token: as the first loss compares them."""
        return preference_losses.row(self.parts[0][0]).averaged


def policy_weights(aligned: Tensor) -> Tensor:
    """(P,) of the (2 P,) means over an answer's tokens of log p_y - log sum_v p_v^2: exp(chosen + rejected).

    Source: Zhou et al. 2024 (WPO), arXiv:2406.11827, equation 2 with the sampled alignment.
    """
    return torch.exp(aligned[0::2] + aligned[1::2])


def sigmoid(answers: Answers, how: LossSettings) -> Tensor:
    """-(1 - e) log s(beta D) - e log s(-beta D), e the label smoothing."""
    return _logistic(how.beta * answers.difference, how.smoothing)


def cpo(answers: Answers, how: LossSettings) -> Tensor:
    """As :func:`sigmoid`, of logp_w - logp_l in place of D, also where another loss of a mixture has a reference.

    The paper adds the chosen answer's cross-entropy (``sft_weight``).
    """
    return _logistic(how.beta * (answers.chosen - answers.rejected), how.smoothing)


def sigmoid_norm(answers: Answers, how: LossSettings) -> Tensor:
    """As :func:`sigmoid`, of r_w / n_w - r_l / n_l in place of D."""
    return _logistic(how.beta * answers.mean_difference, how.smoothing)


def ipo(answers: Answers, how: LossSettings) -> Tensor:
    """(r_w / n_w - r_l / n_l - 1 / (2 beta))^2."""
    return (answers.mean_difference - 1 / (2 * how.beta)) ** 2


def hinge(answers: Answers, how: LossSettings) -> Tensor:
    """(1 - e) max(0, 1 - beta D) + e max(0, 1 + beta D)."""
    scaled = how.beta * answers.difference
    return (1 - how.smoothing) * F.relu(1 - scaled) + how.smoothing * F.relu(1 + scaled)


def robust(answers: Answers, how: LossSettings) -> Tensor:
    """(-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e): unbiased where a share e of the labels is flipped."""
    scaled = how.beta * answers.difference
    found = -(1 - how.smoothing) * F.logsigmoid(scaled) + how.smoothing * F.logsigmoid(-scaled)
    return found / (1 - 2 * how.smoothing)


def apo_zero(answers: Answers, how: LossSettings) -> Tensor:
    """1 - s(beta r_w) + s(beta r_l): for chosen answers that are better than the model's own."""
    return 1 - torch.sigmoid(how.beta * answers.chosen_ratio) + torch.sigmoid(how.beta * answers.rejected_ratio)


def apo_down(answers: Answers, how: LossSettings) -> Tensor:
    """s(beta r_w) + 1 - s(beta D): for chosen answers that are worse than the model's own."""
    return torch.sigmoid(how.beta * answers.chosen_ratio) + 1 - torch.sigmoid(how.beta * answers.difference)


def bco_pair(answers: Answers, how: LossSettings) -> Tensor:
    """-log s(beta r_w) - log s(-beta r_l), without the moving mean that the paper subtracts."""
    return -F.logsigmoid(how.beta * answers.chosen_ratio) - F.logsigmoid(-how.beta * answers.rejected_ratio)


def nca_pair(answers: Answers, how: LossSettings) -> Tensor:
    """-log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2."""
    chosen, rejected = how.beta * answers.chosen_ratio, how.beta * answers.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def sppo_hard(answers: Answers, how: LossSettings) -> Tensor:
    """(r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2."""
    half = 1 / (2 * how.beta)
    return (answers.chosen_ratio - half) ** 2 + (answers.rejected_ratio + half) ** 2


def discopop(answers: Answers, how: LossSettings) -> Tensor:
    """(1 - m) (-log s(x)) + m exp(-x), x = beta D, m = s(x / 0.05)."""
    scaled = how.beta * answers.difference
    sharp = scaled / _DISCOPOP_TAU
    exponential = torch.exp(F.logsigmoid(sharp) - scaled)  # the product's first factor alone is infinite far below 0
    return -F.logsigmoid(scaled) * torch.sigmoid(-sharp) + exponential


def simpo(answers: Answers, how: LossSettings) -> Tensor:
    """-log s(beta (logp_w / n_w - logp_l / n_l) - gamma), whatever the reference of another loss in a mixture."""
    difference = answers.chosen / answers.chosen_tokens - answers.rejected / answers.rejected_tokens
    return -F.logsigmoid(how.beta * difference - how.gamma)


def orpo(answers: Answers, how: LossSettings) -> Tensor:
    """-logp_w / n_w - beta log s(log odds_w - log odds_l), odds = p / (1 - p), p = exp(logp / n).

    The cross-entropy is over the answer; TRL's is over prompt and answer.
    """
    chosen, rejected = answers.chosen / answers.chosen_tokens, answers.rejected / answers.rejected_tokens
    odds = (chosen - rejected) - (_log_one_minus_exp(chosen) - _log_one_minus_exp(rejected))
    return -chosen - how.beta * F.logsigmoid(odds)


def _log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0; near 0 the usual form is -inf, and its gradient NaN."""
    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    of_near, of_far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)
    return torch.where(near, torch.log(-torch.expm1(of_near)), torch.log1p(-torch.exp(of_far)))


def _logistic(scaled: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
