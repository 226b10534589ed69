"""Frozen weights of LoRA operations: several joined into one matrix, and quantized ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.lora_mlp import lora_mlp, lora_mlp_reference
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Projection, join_weights, joined

BF16, F32 = torch.bfloat16, torch.float32


def test_joined_weights_give_the_same_bits_and_keep_their_parameters(device: str, tools: Any, layers: Any) -> None:
    qkv = [layers.make(n * 16, 40, 4) for n in (4, 2, 2)]
    parameters = [torch.nn.Parameter(layer.weight.clone(), requires_grad=False) for layer in qkv]
    buffer = join_weights(parameters)
    assert all(torch.equal(p, layer.weight) for p, layer in zip(parameters, qkv, strict=True))
    view = joined(parameters, F32)
    assert view is not None
    assert view.data_ptr() == buffer.data_ptr()
    assert torch.equal(view, torch.cat([layer.weight for layer in qkv]))
    z = torch.randn(2, 5, 40, device=device)
    outs = []
    for weights in ([layer.weight for layer in qkv], parameters):
        built = [Projection(w, None, lay.a, lay.b, 2.0) for w, lay in zip(weights, qkv, strict=True)]
        outs.append(lora_qkv(z, *built, head_dim=16, backend="triton"))
    assert all(tools.relative(a, b.double()) < 1e-6 for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_joined_weights_match_float64(device: str, tools: Any, layers: Any, bias: bool) -> None:
    mlp = [layers.make(48, 40, 4, bias=bias), layers.make(48, 40, 4, bias=bias), layers.make(40, 48, 4)]

    def joining(z: torch.Tensor, gate: Projection, up: Projection, down: Projection, **kwargs: Any) -> Any:
        weights = [p.weight.clone() for p in (gate, up)]
        join_weights(weights)
        gate, up = (Projection(w, p.bias, p.a, p.b, p.scaling) for w, p in zip(weights, (gate, up), strict=True))
        return lora_mlp(z, gate, up, down, backend="triton", **kwargs)

    tools.assert_float32(
        layers.function(joining, mlp),
        layers.function(lora_mlp_reference, mlp),
        [torch.randn(2, 5, 40, device=device), *layers.flat(*mlp)],
    )


def test_neighbours_in_different_storages_are_not_joined() -> None:
    storage = torch.randn(8, 4)
    assert joined([storage[:3], storage[3:]], F32) is not None
    assert joined([storage[:3], storage[4:]], F32) is None
    assert joined([storage[:3], storage[3:].clone()], F32) is None
    assert joined([storage[:3], storage[3:]], BF16) is None


class _Quantized:
    """A stand-in for a quantized weight: int8 and one scale."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.scale = weight.abs().max() / 127
        self.data = (weight / self.scale).round().to(torch.int8)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.data.to(dtype) * self.scale.to(dtype)


def test_quantized_weights_are_dequantized_where_they_are_used(device: str, tools: Any, layers: Any) -> None:
    mlp = [layers.make(48, 40, 4), layers.make(48, 40, 4), layers.make(40, 48, 4)]
    quantized = [_Quantized(layer.weight) for layer in mlp]

    def call(function: Any, **kwargs: Any) -> Any:
        def run(z: torch.Tensor, *flat: torch.Tensor) -> Any:
            built = [Projection(q, None, flat[2 * i], flat[2 * i + 1], 2.0) for i, q in enumerate(quantized)]
            return function(z, *built, **kwargs)

        return run

    tools.assert_float32(
        call(lora_mlp, backend="triton"),
        call(lora_mlp_reference),
        [torch.randn(2, 5, 40, device=device), *layers.flat(*mlp)],
    )
