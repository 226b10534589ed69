"""Gradients that graphs write become the weights' own, and are accumulated as autograd would."""

from __future__ import annotations

import torch

from ftcli.model.cuda_graphs import Gradients


def test_gradients_are_handed_over_and_accumulated() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(3, 2, requires_grad=True), torch.randn(5, requires_grad=True, dtype=torch.float64)]
    kept = Gradients.zeros_like(weights)
    assert len(kept.buffers) == 2
    rounds = [[torch.randn_like(weight) for weight in weights] for _ in range(3)]
    for written in rounds:
        kept.make_room(weights)
        kept.write(written)
        kept.hand_to(weights)
    for index, weight in enumerate(weights):
        assert weight.grad is not None
        assert torch.equal(weight.grad, rounds[0][index] + rounds[1][index] + rounds[2][index])
    # The next step begins with nothing: its gradients are the written tensors themselves.
    for weight in weights:
        weight.grad = None
    kept.make_room(weights)
    kept.write(rounds[1])
    kept.hand_to(weights)
    assert weights[0].grad is kept.tensors[0]
    assert torch.equal(weights[0].grad, rounds[1][0])
