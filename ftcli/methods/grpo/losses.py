"""From advantages and log-probabilities of completions to the losses of GRPO and its kin.

With log-probabilities l of the policy, l' of the one that sampled, ratios r = exp(l - l') and advantages A:

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

Of the losses that clip, ``delta`` bounds the first r from above (two-sided clip, arXiv:2505.07291). The policy loss of
a completion with A < 0 and mean(l' - l) above ``off_policy_mask_threshold`` is 0 (DeepSeek-V3.2, equation 9), and so is
that of tokens below the 1 - ``top_entropy_quantile`` quantile of a micro-batch's entropies (arXiv:2506.01939).

With ``beta`` each token has beta r (exp(d) - d - 1) more, d = reference - l: Schulman's k3, with the ratio that makes
its gradient that of the reverse KL divergence (DeepSeek-V3.2, section 3.1) unless ``use_bias_correction_kl`` is off.
``entropy_coef`` times the mean entropy of the tokens that are left is subtracted, whatever the loss divides by.

With ``teacher_coef`` c and a teacher's log-probabilities t, a token's advantage is A + c (t - l'), without gradient.
Over what the policy samples, l' - t is the reverse KL divergence on average, and the loss has its gradient (on-policy
distillation: thinkingmachines.ai/blog/on-policy-distillation; MiMo-V2-Flash, arXiv:2601.02780).

The names, the defaults of temperatures and of phi, and what is averaged over what are those of TRL's GRPOTrainer, with
which tests compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ftcli.methods.grpo.settings import GrpoConfig

#: A micro-batch: ``prompt_ids``, ``prompt_mask`` (B, P), ``completion_ids``, ``completion_mask`` (B, C),
#: ``advantages`` (B,), ``num_items_in_batch`` (), and where they are known ``old_per_token_logps``,
#: ``ref_per_token_logps``, ``teacher_per_token_logps``, ``sampling_per_token_logps`` and ``tool_mask`` (B, C), 0 for
#: tokens between two turns.
Completions: TypeAlias = Mapping[str, Tensor]


def loss_mask(batch: Completions) -> Tensor:
    """(B, C): 1 for the tokens that the loss has, which the model wrote."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


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


def policy_loss(
    grpo: GrpoConfig, batch: Completions, log_probs: Tensor, entropies: Tensor, shape: StepShape
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, such that the sum over a step's micro-batches is the loss of the step; and its metrics
    by name, scalars on the device, NaN where there is nothing.

    Args:
        log_probs, entropies: (B, C) float32 in nats, 0 where there is no token.
    """
    mask, advantages = loss_mask(batch), batch["advantages"][:, None]
    old = batch.get("old_per_token_logps", log_probs.detach())
    metrics: dict[str, Tensor] = {}
    if grpo.teacher_coef:
        above = batch["teacher_per_token_logps"] - old
        advantages = advantages + grpo.teacher_coef * above
        metrics["teacher_kl"] = _token_mean(-above, mask)
    log_ratio = log_probs - old
    log_weights = log_ratio
    if grpo.importance_sampling_level == "sequence":
        log_weights = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0))[:, None]
    ratio = torch.exp(log_weights)
    phi = _phi(advantages, log_ratio, mask) if grpo.loss_type == "vespo" else None
    token_loss = _token_loss(grpo, ratio, advantages, log_probs, phi)
    if grpo.off_policy_mask_threshold is not None:
        drift = batch.get("sampling_per_token_logps", old) - log_probs.detach()
        dropped = (batch["advantages"][:, None] < 0) & (
            _row_means(drift, mask)[:, None] > grpo.off_policy_mask_threshold
        )
        token_loss = token_loss.masked_fill(dropped, 0.0)
        metrics["off_policy_masked"] = dropped.float().mean()
    learning = mask
    if grpo.top_entropy_quantile < 1:
        learning = _high_entropy(entropies.detach(), mask, 1 - grpo.top_entropy_quantile)
        token_loss = token_loss * learning
    if grpo.beta:
        reference = batch["ref_per_token_logps"]
        kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
        kl = kl * ratio if grpo.use_bias_correction_kl else kl
        token_loss = token_loss + grpo.beta * kl
        metrics["kl"] = _token_mean(kl, mask)
    metrics["entropy"] = _token_mean(entropies, mask)
    metrics |= _clip_metrics(grpo, ratio, advantages, mask, phi)
    loss = _reduced(grpo, token_loss, batch, shape)
    if grpo.entropy_coef:
        bonus = (entropies * learning).sum() / learning.sum().clamp(min=1.0)
        loss = loss - grpo.entropy_coef * bonus / shape.micro_batches
    return loss, {name: value.detach() for name, value in metrics.items()}


def _high_entropy(entropies: Tensor, mask: Tensor, quantile: float) -> Tensor:
    """(B, C): 1 for the tokens whose entropy is at that quantile of all or above; of none where there are none."""
    known = entropies[mask.bool()]
    if not known.numel():
        return mask
    return mask * (entropies >= torch.quantile(known, quantile))


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
    clipped = torch.clamp(ratio, 1 - low, 1 + high) * advantages
    bounded = ratio if grpo.delta is None else ratio.clamp(max=grpo.delta)
    return -torch.min(bounded * advantages, clipped)


def _reduced(grpo: GrpoConfig, token_loss: Tensor, batch: Completions, shape: StepShape) -> Tensor:
    mask, name = loss_mask(batch), grpo.loss_type
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
    """NaN of a row without a token."""
    return values.squeeze(1) if values.shape[1] == 1 else (values * mask).sum(-1) / mask.sum(-1)


def _lowest(values: Tensor) -> Tensor:
    """The smallest number that is not NaN; NaN where all are."""
    lowest = values.masked_fill(values.isnan(), math.inf).min()
    return torch.where(values.isnan().all(), math.nan, lowest)
