"""TRL pads prompts on the left; attention of a training step must take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from ftcli.trainers.grpo import GrpoTrainer


def test_a_training_step_does_without_cudnns_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward returns NaN for rows that see no key (tests/gpu/test_padding.py)."""
    inside: list[bool] = []

    def step(*_: Any) -> torch.Tensor:
        inside.append(torch.backends.cuda.cudnn_sdp_enabled())
        return torch.zeros(())

    monkeypatch.setattr(GRPOTrainer, "training_step", step)
    trainer = GrpoTrainer.__new__(GrpoTrainer)
    trainer._batch = -1
    before = torch.backends.cuda.cudnn_sdp_enabled()
    trainer.training_step(torch.nn.Identity(), {})
    assert inside == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
