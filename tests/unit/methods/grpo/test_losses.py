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


def test_a_teachers_advantage_has_the_gradient_of_the_reverse_divergence() -> None:
    """Of one token, sampled as often as the policy says: -A grad log p over all of them is grad KL(p || t), whatever
    else is constant; and each loss has the formula's advantage of each token.
    """
    torch.manual_seed(1)
    shares = torch.tensor([1.0, 2.0, 5.0, 8.0], dtype=torch.float64) / 16
    logits = shares.log().requires_grad_()
    teacher = torch.log_softmax(torch.randn(4, dtype=torch.float64), 0)
    rows = torch.arange(4).repeat_interleave((shares * 16).round().long())
    grpo = GrpoConfig(teacher_coef=0.7, loss_type="dapo")
    ones = torch.ones(16, 1, dtype=torch.float64)
    batch = {"completion_mask": ones, "advantages": torch.zeros(16, dtype=torch.float64)}
    batch |= {"num_items_in_batch": ones.sum(), "teacher_per_token_logps": teacher[rows][:, None]}
    log_probs = torch.log_softmax(logits, 0)
    loss, told = policy_loss(grpo, batch, log_probs[rows][:, None], torch.zeros_like(ones), StepShape(1, 1))
    divergence = (log_probs.exp() * (log_probs - teacher)).sum()
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(0.7 * divergence, logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    assert float(told["teacher_kl"]) == pytest.approx(divergence.item(), rel=1e-12)
