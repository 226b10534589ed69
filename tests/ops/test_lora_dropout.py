"""Dropout in front of adapters. With A and B the identity and W zero, the layer shows its mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Projection


def _mask_layer(device: str, features: int, dropout: float) -> Projection:
    eye = torch.eye(features, device=device)
    return Projection(
        torch.zeros_like(eye), None, eye.clone().requires_grad_(), eye.clone().requires_grad_(), 1.0, dropout
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_dropout_drops_scales_and_repeats_its_mask_in_backward(device: str, backend: Any) -> None:
    z = torch.rand(64, 16, device=device).add(0.5).requires_grad_()
    layer = _mask_layer(device, 16, 0.25)
    y = lora_linear(z, layer, backend=backend)
    mask = (y != 0).float() / 0.75
    assert torch.allclose(y, z * mask, atol=1e-6)
    assert 0.15 < float((mask == 0).float().mean()) < 0.35
    dy = torch.randn(64, 16, device=device)
    dz, da = torch.autograd.grad(y, (z, layer.a), dy)
    assert torch.allclose(dz, dy * mask, atol=1e-6)
    assert torch.allclose(da, dy.t() @ (z * mask), atol=1e-4)


def test_dropout_follows_the_seed_and_differs_between_adapters(device: str) -> None:
    z = torch.rand(1, 32, 16, device=device) + 0.5
    q, k, v = (_mask_layer(device, 16, 0.5) for _ in range(3))

    def masks(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [t != 0 for t in lora_qkv(z, q, k, v, head_dim=16, backend="triton")[:3]]

    first, again, other = masks(1), masks(1), masks(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["linear", "qkv", "mlp"])
def test_dropout_gradients_behind_a_norm_are_consistent(device: str, layers: Any, which: int) -> None:
    """Numerical differentiation with the seed fixed: forward and backward use one mask, in every group."""
    _, operation, _, used, options = layers.three()[which]
    inputs = [torch.randn(1, 5, 64, device=device), torch.rand(64, device=device) + 0.5, *layers.flat(*used)]
    if "rope" in options:
        options["rope"] = tuple(torch.randn(1, 5, 16, device=device) for _ in range(2))

    def dropping(z: torch.Tensor, *projections: Projection, **kwargs: Any) -> Any:
        torch.manual_seed(3)
        dropped = [Projection(p.weight, p.bias, p.a, p.b, p.scaling, 0.3) for p in projections]
        return operation(z, *dropped, **kwargs)

    call = layers.function(dropping, used, backend="triton", **options)
    assert torch.autograd.gradcheck(call, [t.double().requires_grad_() for t in inputs], fast_mode=True)
