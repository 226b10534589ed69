"""Losses of micro-batches, which add up to the loss of a step however it is cut."""

from __future__ import annotations

import pytest
import torch

from ftcli.methods.grpo.losses import StepShape, policy_loss
from ftcli.methods.grpo.settings import GrpoConfig

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
        return float(policy_loss(grpo, part, log_probs[rows], torch.zeros_like(log_probs[rows]), shape)[0])

    whole = loss(slice(0, ROWS), StepShape(1, 1))
    found = sum(loss(slice(at, at + 2), StepShape(4 // steps, 4)) for at in range(0, ROWS, 2))
    assert found == pytest.approx(whole * steps, rel=1e-5)
