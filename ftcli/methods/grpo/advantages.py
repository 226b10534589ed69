"""From rewards to advantages: how much better a completion is than what it is compared with.

With a completion's reward r, the n rewards of its prompt's group (mean m, deviation s), and those of all completions of
a rollout (mean M, deviation S):

==============================  ======================================================  ==============================
``advantage_estimator``         advantage                                               source
==============================  ======================================================  ==============================
``grpo``                        (r - m) / (s + e), / (S + e) or r - m                   arXiv:2402.03300, 2503.20783
``rloo``                        r - mean of the n - 1 others                            arXiv:2402.14740
``reinforce_plus_plus``         (r - M) / (S + e)                                       arXiv:2501.03262, section 3
``reinforce_plus_plus_          r - m, less the mean of these over all, divided by      the same, its baseline variant
baseline``                      their deviation + e
==============================  ======================================================  ==============================

With ``multi_objective_aggregation: normalize_then_sum`` (GDPO, arXiv:2601.05242) each reward becomes (r - m) / (s + e)
by itself; their weighted sum is less its mean over all, and divided by its deviation + e. e is 1e-4, as in TRL, with
whose trainers tests compare ``grpo``, ``rloo`` and GDPO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ftcli.methods.grpo.settings import GrpoConfig

#: Added to deviations that advantages are divided by.
_EPSILON = 1e-4


@dataclass(frozen=True, slots=True)
class Advantages:
    """What completions learn from.

    Attributes:
        values: (completions,) float32; 0 where no reward had an opinion, and where there is nothing to compare.
        rewards: (completions,) weighted sums, NaN where no reward had an opinion.
        without_spread: (groups,) bool, those whose completions are worth the same.
    """

    values: Tensor
    rewards: Tensor
    without_spread: Tensor


def advantages_of(rewards: Tensor, weights: Tensor, grpo: GrpoConfig) -> Advantages:
    """The advantages that the settings ask for.

    Args:
        rewards: (completions, rewards), NaN where a reward had no opinion; groups one after the other.
        weights: (rewards,).
    """
    group, estimator = grpo.num_generations, grpo.advantage_estimator
    total = (rewards * weights[None]).nansum(1)
    total[rewards.isnan().all(1)] = torch.nan
    alike = without_spread(rewards, weights, grpo)
    if grpo.multi_objective_aggregation == "normalize_then_sum":
        values = _standardized(_normalized_each(rewards, weights, group))
    elif estimator == "grpo":
        values = _of_group(total, group, grpo.scale_rewards)
    elif estimator == "rloo":
        values = _leave_one_out(total, group)
        values = _standardized(values) if grpo.scale_rewards == "batch" else values
    elif estimator == "reinforce_plus_plus":
        values = _standardized(total)
    else:
        values = _standardized(_of_group(total, group, "none"))
    # Equal rewards leave rounding in the advantages, which a division by no spread at all makes larger.
    silent = alike.repeat_interleave(group)
    if estimator == "reinforce_plus_plus":
        silent = _alike(total[None]).expand_as(total)
    return Advantages(torch.nan_to_num(values, nan=0.0).masked_fill(silent, 0.0), total, alike)


def without_spread(rewards: Tensor, weights: Tensor, grpo: GrpoConfig) -> Tensor:
    """(groups,) bool: which groups teach nothing by themselves, since all of their completions that have a reward have
    the same one; where each reward is compared for itself, the same of each that counts.
    """
    group = grpo.num_generations
    if grpo.multi_objective_aggregation == "normalize_then_sum":
        counting = rewards[:, weights != 0].T.reshape(-1, rewards.shape[0] // group, group)
        return _alike(counting).all(0)
    total = (rewards * weights).nansum(1)
    return _alike(total.masked_fill(rewards.isnan().all(1), math.nan).view(-1, group))


def _alike(values: Tensor) -> Tensor:
    """(...): whether those of the last dimension that are not NaN are equal, or none."""
    highest = values.nan_to_num(nan=-math.inf).amax(-1)
    return highest <= values.nan_to_num(nan=math.inf).amin(-1)


def _of_group(total: Tensor, group: int, scale: str) -> Tensor:
    groups = total.view(-1, group)
    values = total - torch.nanmean(groups, dim=1).repeat_interleave(group)
    if scale == "none":
        return values
    spread = deviation(groups, 1).repeat_interleave(group) if scale == "group" else deviation(total)
    return values / (spread + _EPSILON)


def _leave_one_out(total: Tensor, group: int) -> Tensor:
    groups = total.view(-1, group)
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    return (groups - (groups.nansum(1, keepdim=True) - groups) / others).flatten()


def _normalized_each(rewards: Tensor, weights: Tensor, group: int) -> Tensor:
    groups = rewards.view(-1, group, rewards.shape[1])
    values = (groups - torch.nanmean(groups, dim=1, keepdim=True)) / (deviation(groups, 1)[:, None] + _EPSILON)
    total = (values.view_as(rewards) * weights).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), math.nan)


def _standardized(values: Tensor) -> Tensor:
    return (values - torch.nanmean(values)) / (deviation(values) + _EPSILON)


def deviation(values: Tensor, dim: int | None = None) -> Tensor:
    """The sample deviation of the numbers that are not NaN; NaN where there are fewer than two."""
    mean = torch.nanmean(values, dim=dim, keepdim=True)
    variance = torch.nanmean((values - mean) ** 2, dim=dim, keepdim=True)
    count = torch.sum(~values.isnan(), dim=dim, keepdim=True)
    correction = torch.where(count > 1, count / (count - 1), torch.full_like(variance, math.nan))
    found = torch.sqrt(variance * correction)
    return found.squeeze() if dim is None else found.squeeze(dim)


def overlong_penalties(lengths: Tensor, grpo: GrpoConfig) -> Tensor:
    """(completions,) float32: 0 up to ``overlong_buffer`` tokens before the longest completion, from there down to -1
    in equal steps.

        min(0, (longest - buffer - length) / buffer)

    Source: DAPO, arXiv:2503.14476, equation 13; TRL's ``get_soft_overlong_punishment``.
    """
    buffer = grpo.overlong_buffer or 1
    room = grpo.max_completion_length - buffer - lengths.float()
    return (room / buffer).clamp(-1.0, 0.0)
