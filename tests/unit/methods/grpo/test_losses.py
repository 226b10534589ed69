"""Advantages from rewards; and losses of micro-batches, which add up to the loss of a step however it is cut."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from ftcli.methods.grpo.losses import StepShape, advantages_of, policy_loss
from ftcli.methods.grpo.settings import GrpoConfig

Scale = Literal["group", "batch", "none"]
SCALES: tuple[Scale, ...] = ("group", "batch", "none")


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_teach_exactly_nothing(scale: Scale) -> None:
    """The mean of seven times 0.7 is not 0.7 in float32; what that leaves must not become an advantage."""
    same = torch.full((7, 1), 0.7)
    assert (same[:, 0] - same[:, 0].mean()).abs().max() > 0.0
    mixed = torch.tensor([[0.0], [1.0], [0.5], [0.5], [0.0], [1.0], [0.25]])
    found = advantages_of(torch.cat([same, mixed]), torch.ones(1), 7, scale)
    assert found.without_spread.tolist() == [True, False]
    assert found.values[:7].tolist() == [0.0] * 7
    assert found.values[7:].abs().max() > 0.1


@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_the_formula(scale: Scale) -> None:
    """Two rewards, the second of which weighs three times as much; one completion has no reward at all."""
    none = math.nan
    rewards = torch.tensor([[1.0, 0.5], [0.0, none], [none, none], [2.0, 1.0], [0.25, 0.0], [1.0, 1.0]])
    total = [2.5, 0.0, none, 5.0, 0.25, 4.0]
    found = advantages_of(rewards, torch.tensor([1.0, 3.0]), 3, scale)
    assert found.rewards.tolist() == pytest.approx(total, nan_ok=True)
    spreads = {"group": [1.767767, 2.504163], "batch": [2.219234, 2.219234], "none": [1.0, 1.0]}[scale]
    epsilon = 0.0 if scale == "none" else 1e-4
    wanted = []
    for group, spread in zip((total[:3], total[3:]), spreads, strict=True):
        scored = [reward for reward in group if not math.isnan(reward)]
        mean = sum(scored) / len(scored)
        wanted += [0.0 if math.isnan(reward) else (reward - mean) / (spread + epsilon) for reward in group]
    assert found.values.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


ROWS, LENGTH = 8, 5


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_step_divides_by_its_share_of_the_tokens_of_all_completions(loss_type: str, steps: int) -> None:
    """Four micro-batches of two rows, taken in ``steps`` optimizer steps: together the loss over all tokens."""
    torch.manual_seed(0)
    grpo = GrpoConfig.model_validate({"loss_type": loss_type, "rewards": [{"use": "exact_match"}], "beta": 0.0})
    mask = (torch.arange(LENGTH)[None] < torch.randint(1, LENGTH + 1, (ROWS, 1))).float()
    log_probs, old = -torch.rand(ROWS, LENGTH) * mask, -torch.rand(ROWS, LENGTH) * mask
    batch = {"completion_mask": mask, "advantages": torch.randn(ROWS), "old_per_token_logps": old}

    def loss(rows: slice, shape: StepShape) -> float:
        part = {name: value[rows] for name, value in batch.items()} | {"num_items_in_batch": mask.sum()}
        return float(policy_loss(grpo, part, log_probs[rows], torch.zeros_like(log_probs[rows]), shape).loss)

    whole = loss(slice(0, ROWS), StepShape(1, 1))
    found = sum(loss(slice(at, at + 2), StepShape(4 // steps, 4)) for at in range(0, ROWS, 2))
    assert found == pytest.approx(whole * steps, rel=1e-5)
