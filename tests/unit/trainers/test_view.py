"""What stands for a model in the training loop puts all of it into training mode."""

from __future__ import annotations

import torch
from torch import nn

from ftcli.trainers.view import TrainedView


def test_modules_that_were_loaded_in_evaluation_mode_are_trained() -> None:
    """As a model of transformers in PEFT's wrapper: only the wrapper says that it is in training mode."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)))
    for module in model.children():
        module.eval()
    assert model.training
    view = TrainedView(model)
    view.train()
    assert all(module.training for module in model.modules())
    view.train(False)
    assert not any(module.training for module in model.modules())
    model.train()
    view.train()
    assert all(module.training for module in model.modules())
    assert torch.equal(next(view.parameters()), next(model.parameters()))
