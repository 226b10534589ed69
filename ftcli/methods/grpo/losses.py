"""From rewards to advantages, and from log-probabilities of completions to the losses of GRPO and its kin.

An advantage is how much better a completion is than the others of its prompt. With log-probabilities l of the policy,
l' of the one that sampled, ratios r = exp(l - l') and advantages A:

====================  =====================================================  ====================================
loss                  of a token                                             divided by
====================  =====================================================  ====================================
grpo                  -min(r A, clip(r, 1 - e, 1 + e') A)                    tokens of each completion, then rows
bnpo, dr_grpo, dapo   the same                                               tokens; rows x longest; all tokens
luspo                 the same, summed over a completion                     rows
cispo                 -min(r, e') A l, no gradient through r                 all tokens
sapo                  -4 sigmoid(t (r - 1)) / t A                            tokens of each completion, then rows
vespo                 -phi(w) A l, w the ratio of the whole completion       all tokens
====================  =====================================================  ====================================

With ``beta`` each token has beta r (exp(d) - d - 1) more, d = reference - l: Schulman's k3, with the ratio that makes
its gradient that of the reverse KL divergence (DeepSeek-V3.2, section 3.1). The names, the defaults of temperatures and
of phi, and what is averaged over what are those of TRL's GRPOTrainer, with which tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ftcli.methods.grpo.settings import GrpoConfig

#: Added to deviations that advantages are divided by.
_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class Advantages:
    """What completions learn from.

    Attributes:
        values: (completions,) float32; 0 where no reward had an opinion, and in groups without spread.
        rewards: (completions,) weighted sums, NaN where no reward had an opinion.
        without_spread: (groups,) bool, those that teach nothing.
    """

    values: Tensor
    rewards: Tensor
    without_spread: Tensor


def advantages_of(rewards: Tensor, weights: Tensor, group: int, scale: Literal["group", "batch", "none"]) -> Advantages:
    """(r - mean of its group) / (deviation + 1e-4), the deviation that of the group, of all, or left out.

    Source: Shao et al. 2024, arXiv:2402.03300; ``none`` as in Dr. GRPO, arXiv:2503.20783.

    Args:
        rewards: (completions, rewards), NaN where a reward had no opinion; groups one after the other.
        weights: (rewards,).
        group: Completions of a prompt.
    """
    total = (rewards * weights[None]).nansum(1)
    total[rewards.isnan().all(1)] = torch.nan
    groups = total.view(-1, group)
    values = total - torch.nanmean(groups, dim=1).repeat_interleave(group)
    if scale == "group":
        values = values / (deviation(groups, 1).repeat_interleave(group) + _EPSILON)
    elif scale == "batch":
        values = values / (deviation(total).expand_as(total) + _EPSILON)
    alike = without_spread(rewards, weights, group)
    # Equal rewards leave rounding in the advantages, which a division by no spread at all makes larger.
    values = torch.nan_to_num(values, nan=0.0).masked_fill(alike.repeat_interleave(group), 0.0)
    return Advantages(values, total, alike)


def without_spread(rewards: Tensor, weights: Tensor, group: int) -> Tensor:
    """(groups,) bool: which groups teach nothing, since all of their completions that have a reward have the same one.

    Args:
        rewards, weights, group: As :func:`advantages_of`.
    """
    unscorable = rewards.isnan().all(1)
    total = (rewards * weights).nansum(1)
    highest = total.masked_fill(unscorable, -math.inf).view(-1, group).amax(1)
    lowest = total.masked_fill(unscorable, math.inf).view(-1, group).amin(1)
    return highest <= lowest


def deviation(values: Tensor, dim: int | None = None) -> Tensor:
    """The sample deviation of the numbers that are not NaN; NaN where there are fewer than two."""
    mean = torch.nanmean(values, dim=dim, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=dim, keepdim=True)
    count = torch.sum(~values.isnan(), dim=dim, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.full_like(variance, math.nan))
    found = torch.sqrt(variance * correction)
    return found.squeeze() if dim is None else found.squeeze(dim)


#: A micro-batch: ``prompt_ids``, ``prompt_mask`` (B, P), ``completion_ids``, ``completion_mask`` (B, C),
#: ``advantages`` (B,), ``num_items_in_batch`` (), and where they are known ``old_per_token_logps``,
#: ``ref_per_token_logps`` and ``sampling_per_token_logps`` (B, C).
Completions: TypeAlias = Mapping[str, Tensor]

#: SAPO's temperatures of completions with a positive and with another advantage (arXiv:2511.20347).
_SAPO_POSITIVE, _SAPO_OTHER = 1.0, 1.05
#: VESPO's k and lambda, likewise.
_VESPO_K, _VESPO_LAMBDA = (2.0, 3.0), (3.0, 2.0)
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True, slots=True)
class StepShape:
    """How a step is split: ``micro_batches`` over all ranks, of ``generated`` that one set of completions serves."""

    micro_batches: int
    generated: int


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of a micro-batch, and its metrics by name: scalars on the device, NaN where there is nothing."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


def policy_loss(
    grpo: GrpoConfig, batch: Completions, log_probs: Tensor, entropies: Tensor, shape: StepShape
) -> PolicyLoss:
    """The loss of a micro-batch, such that the sum over a step's micro-batches is the loss of the step.

    Args:
        log_probs, entropies: (B, C) float32 in nats, 0 where there is no token.
    """
    mask, advantages = batch["completion_mask"], batch["advantages"][:, None]
    old = batch.get("old_per_token_logps")
    log_ratio = log_probs - (log_probs.detach() if old is None else old)
    log_weights = log_ratio
    if grpo.importance_sampling_level == "sequence":
        log_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    ratio = torch.exp(log_weights)
    phi = _phi(advantages, log_ratio, mask) if grpo.loss_type == "vespo" else None
    token_loss = _token_loss(grpo, ratio, advantages, log_probs, phi)
    metrics: dict[str, Tensor] = {}
    if grpo.beta:
        reference = batch["ref_per_token_logps"]
        kl = (torch.exp(reference - log_probs) - (reference - log_probs) - 1) * ratio
        token_loss = token_loss + grpo.beta * kl
        metrics["kl"] = _token_mean(kl, mask)
    metrics["entropy"] = _token_mean(entropies, mask)
    metrics |= _clip_metrics(grpo, ratio, advantages, mask, phi)
    return PolicyLoss(
        _reduced(grpo, token_loss, batch, shape), {name: value.detach() for name, value in metrics.items()}
    )


def _token_loss(grpo: GrpoConfig, ratio: Tensor, advantages: Tensor, log_probs: Tensor, phi: Tensor | None) -> Tensor:
    """(B, C), or (B, 1) where completions have one ratio."""
    low, high = _range(grpo)
    if phi is not None:
        return -phi * advantages * log_probs
    if grpo.loss_type == "cispo":
        return -torch.clamp(ratio, max=high).detach() * advantages * log_probs
    if grpo.loss_type == "sapo":
        temperatures = torch.where(advantages > 0, _SAPO_POSITIVE, _SAPO_OTHER)
        return -(torch.sigmoid(temperatures * (ratio - 1)) * 4 / temperatures) * advantages
    return -torch.min(ratio * advantages, torch.clamp(ratio, 1 - low, 1 + high) * advantages)


def _reduced(grpo: GrpoConfig, token_loss: Tensor, batch: Completions, shape: StepShape) -> Tensor:
    mask, name = batch["completion_mask"], grpo.loss_type
    if name in ("grpo", "sapo"):
        loss = ((token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    elif name == "bnpo":
        loss = (token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    elif name == "dr_grpo":
        loss = (token_loss * mask).sum() / (token_loss.size(0) * grpo.max_completion_length)
    elif name == "luspo":
        loss = (token_loss * mask).sum(-1).mean()
    else:  # all tokens of the completions that the step learns from
        tokens = batch["num_items_in_batch"].clamp(min=1.0) * shape.micro_batches / shape.generated
        return (token_loss * mask).sum() / tokens
    return loss / shape.micro_batches


def _range(grpo: GrpoConfig) -> tuple[float, float]:
    return grpo.epsilon, grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high


@torch.no_grad()
def _phi(advantages: Tensor, log_ratio: Tensor, mask: Tensor) -> Tensor:
    """(B, 1): exp(lambda + k log w - lambda w), w the clamped ratio of a whole completion."""
    lowest = math.log(1e-8)
    summed = torch.sum(torch.clamp(log_ratio, -20.0, 20.0) * mask, dim=-1, keepdim=True)
    log_w = torch.clamp(summed, lowest, 20.0)
    gains = advantages >= 0
    k = torch.where(gains, *_VESPO_K)
    rate = torch.where(gains, *_VESPO_LAMBDA).clamp(min=1e-4)
    phi = torch.exp(rate + k * log_w - rate * torch.exp(log_w))
    return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def _clip_metrics(
    grpo: GrpoConfig, ratio: Tensor, advantages: Tensor, mask: Tensor, phi: Tensor | None
) -> dict[str, Tensor]:
    low, high = _range(grpo)
    if phi is not None:
        return {"vespo/phi_seq_mean": _token_mean(phi, mask)}
    if grpo.loss_type == "cispo":
        return {"cispo_clip_ratio": _token_mean(((ratio > high) & (advantages > 0)).float(), mask)}
    if grpo.loss_type not in _CLIPPED:
        return {}
    below = ((ratio < 1 - low) & (advantages < 0)).float()
    above = ((ratio > 1 + high) & (advantages > 0)).float()
    return {
        "clip_ratio/low_mean": _token_mean(below, mask),
        "clip_ratio/high_mean": _token_mean(above, mask),
        "clip_ratio/region_mean": _token_mean(torch.max(below, above), mask),
        "clip_ratio/low_min": _lowest(_row_means(below, mask)),
        "clip_ratio/high_max": -_lowest(-_row_means(above, mask)),
    }


def _token_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Over all tokens; over completions where each has one value."""
    if values.shape[1] == 1:
        return values.sum() / torch.tensor(float(values.shape[0]), device=values.device)
    return (values * mask).sum() / mask.sum().float().clamp(min=1.0)


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    return values.squeeze(1) if values.shape[1] == 1 else (values * mask).sum(-1) / mask.sum(-1)


def _lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN; NaN where all are."""
    lowest = values.masked_fill(values.isnan(), math.inf).min()
    return torch.where(values.isnan().all(), math.nan, lowest)
