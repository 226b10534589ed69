"""From rewards to advantages: how much better a completion is than the others of its prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

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
