"""float16 trains under a scaled loss: overflows are skipped, and gradients that overflow at every scale are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.errors import ExitCode, FtcliError
from ftcli.trainers.scaling import MOST_SKIPPED, SkippedSteps, unscale, use_loss_scaling

CPU = torch.device("cpu")


def trainer_of(parameter: torch.nn.Parameter) -> Any:
    """What a trainer has after transformers prepared it: an optimizer in accelerate's wrapper."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)

    trainer = SimpleNamespace(accelerator=SimpleNamespace(scaler=None), optimizer=None)
    use_loss_scaling(trainer, CPU)
    trainer.optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=trainer.accelerator.scaler)
    return trainer


def test_gradients_are_divided_by_the_scale_once_before_clipping() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    trainer = trainer_of(parameter)
    scaler = trainer.accelerator.scaler
    scaler.scale((parameter * torch.tensor([1.0, 2.0, 3.0])).sum()).backward()
    assert parameter.grad is not None
    assert parameter.grad[0] == scaler.get_scale() > 1.0
    assert unscale(trainer)
    assert torch.equal(parameter.grad, torch.tensor([1.0, 2.0, 3.0]))
    trainer.optimizer.step()
    assert torch.equal(parameter.detach(), -torch.tensor([1.0, 2.0, 3.0]))


def test_a_step_that_overflows_changes_nothing_and_halves_the_scale() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    trainer = trainer_of(parameter)
    before = trainer.accelerator.scaler.get_scale()
    trainer.accelerator.scaler.scale((parameter * torch.inf).sum()).backward()
    unscale(trainer)
    trainer.optimizer.step()
    assert torch.equal(parameter.detach(), torch.zeros(2))
    assert trainer.optimizer.step_was_skipped
    assert trainer.accelerator.scaler.get_scale() == before / 2


def test_without_a_scaler_gradients_are_left_alone() -> None:
    assert not unscale(SimpleNamespace(accelerator=SimpleNamespace(scaler=None), optimizer=None))


def test_twenty_skipped_steps_in_a_row_are_divergence() -> None:
    skipped = SkippedSteps()
    for step in range(MOST_SKIPPED - 1):
        skipped.note(skipped=True, step=step)
    skipped.note(skipped=False, step=MOST_SKIPPED)
    for step in range(MOST_SKIPPED - 1):
        skipped.note(skipped=True, step=step)
    with pytest.raises(FtcliError) as raised:
        skipped.note(skipped=True, step=40)
    assert raised.value.findings[0].code == "FT702"
    assert raised.value.exit_code == ExitCode.DIVERGED
