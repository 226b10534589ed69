"""The norm of gradients taken beside backward is that of a pass over all of them after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ftcli.train.optimizer import GradientNorms

pytestmark = pytest.mark.gpu


def test_it_is_the_norm_of_the_step() -> None:
    """Of what several micro-batches add up to; a parameter that has no gradient in a step counts for nothing."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(2048, 2048, device="cuda") for _ in range(4)])
    parameters = list(layers.parameters())
    norms = GradientNorms(parameters)
    for count, micro_batches in ((4, 1), (4, 3), (2, 1), (4, 2)):
        for _ in range(micro_batches):
            x = torch.randn(512, 2048, device="cuda")
            for layer in layers[:count]:
                x = layer(x).tanh()
            x.square().sum().backward()
        found = norms.total()
        wanted = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        assert float(wanted) > 0
        assert torch.allclose(found, wanted, rtol=1e-5)
        for parameter in parameters:
            parameter.grad = None
