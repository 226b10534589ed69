"""The LoRA operations on fp8 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.fp8 import Fp8Weight, join_fp8, joined_fp8, part_fp8, quantize_weight
from ftkernels.lora_linear import lora_linear
from ftkernels.lora_mlp import lora_mlp
from ftkernels.lora_qkv import lora_qkv
from ftkernels.projection import Norm, Projection
from torch import Tensor

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def _relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def _random(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape).to(device)


def _projection(device: str, weight: Any, rank: int, seed: int) -> Projection:
    generator = torch.Generator().manual_seed(seed)
    out_features, in_features = weight.shape
    a = (torch.randn(rank, in_features, generator=generator) / in_features**0.5).to(device).requires_grad_()
    b = (torch.randn(out_features, rank, generator=generator) * 0.2).to(device).requires_grad_()
    return Projection(weight, None, a, b, 2.0)


def _norm(device: str, features: int) -> Norm:
    return Norm(torch.linspace(0.5, 1.5, features, device=device).requires_grad_(), 1e-5, "llama")


def _linear(z: Tensor, p: list[Projection], norm: Norm, backend: Any) -> list[Tensor]:
    return [lora_linear(z, p[0], norm=norm, residual=z[..., :48], backend=backend)]


def _qkv(z: Tensor, p: list[Projection], norm: Norm, backend: Any) -> list[Tensor]:
    angles = torch.linspace(0, 6, 6 * 16, device=z.device).view(1, 6, 16)
    qkv = lora_qkv(z, *p, head_dim=16, norm=norm, rope=(angles.cos(), angles.sin()), backend=backend)
    return [qkv.q, qkv.k, qkv.v]


def _mlp(z: Tensor, p: list[Projection], norm: Norm, backend: Any) -> list[Tensor]:
    y = lora_mlp(z, *p, norm=norm, residual="add", backend=backend)
    assert isinstance(y, Tensor)
    return [y]


OPERATIONS: list[tuple[str, Callable[..., list[Tensor]], list[tuple[int, int]], int]] = [
    ("linear", _linear, [(48, 64)], 1),
    ("qkv", _qkv, [(64, 64), (32, 64), (32, 64)], 3),
    ("mlp", _mlp, [(96, 64), (96, 64), (64, 96)], 2),
]


def _run(
    operation: Callable[..., list[Tensor]], device: str, weights: list[Any], dtype: torch.dtype, backend: Any
) -> list[Tensor]:
    """Outputs, then gradients of input, norm and adapters."""
    projections = [_projection(device, w, 4, seed) for seed, w in enumerate(weights)]
    norm = _norm(device, 64)
    generator = torch.Generator().manual_seed(5)
    z = torch.randn(2, 6, 64, generator=generator).to(device, dtype).requires_grad_()
    outputs = operation(z, projections, norm, backend)
    leaves = [z, norm.weight, *(t for p in projections for t in (p.a, p.b) if t is not None)]
    incoming = [torch.randn(o.shape, generator=generator).to(device, o.dtype) for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, incoming)]


def _weights(device: str, shapes: list[tuple[int, int]], group: int) -> list[Fp8Weight]:
    """The first ``group`` lie one behind the other."""
    made = [quantize_weight(_random(device, *shape) / shape[1] ** 0.5) for shape in shapes]
    return [*join_fp8(made[:group]), *made[group:]]


@pytest.mark.parametrize(("name", "operation", "shapes", "group"), OPERATIONS, ids=[o[0] for o in OPERATIONS])
def test_lora_operations_on_fp8_weights(
    device: str, name: str, operation: Any, shapes: list[tuple[int, int]], group: int
) -> None:
    """The kernels agree with plain torch on the same weights; both with the dequantized model within the bounds of
    rounding activations and gradients to 3 bits: one product in front of the output, up to three in front of a
    gradient.
    """
    weights = _weights(device, shapes, group)
    assert joined_fp8(weights[:group]) is not None
    dtype = BF16 if device == "cuda" else F32
    got = _run(operation, device, weights, dtype, "triton")
    plain = _run(operation, device, weights, dtype, "torch")
    dense = _run(operation, device, [w.dequantize(dtype) for w in weights], dtype, "torch")
    for index, (value, reference, exact) in enumerate(zip(got, plain, dense, strict=True)):
        assert torch.isfinite(value).all()
        # In bfloat16 the two round differently in front of a product, which then rounds to 3 bits.
        assert _relative(value, reference) < (1e-2 if dtype == F32 else 6e-2), (name, index)
        assert _relative(value, exact) < 8e-2, (name, index)
    assert max(_relative(v, e) for v, e in zip(got, dense, strict=True)) > 1e-2  # it was fp8


def test_groups_without_neighbours_and_with_some_biases(device: str) -> None:
    """Moved or copied weights are multiplied one by one; biases are added to whoever has one."""
    joined = _weights(device, [(64, 64), (32, 64), (32, 64)], 3)
    z = _random(device, 2, 6, 64)

    def call(weights: list[Fp8Weight], biased: tuple[bool, ...]) -> Tensor:
        ones = [torch.ones(w.shape[0], device=device) if b else None for w, b in zip(weights, biased, strict=True)]
        parts = [Projection(w, bias) for w, bias in zip(weights, ones, strict=True)]
        qkv = lora_qkv(z, *parts, head_dim=16, backend="triton")
        return torch.cat([t.transpose(1, 2).flatten(2) for t in qkv[:3]], dim=-1)

    alone = [part_fp8(w) for w in joined]
    plain = call(joined, (False,) * 3)
    assert _relative(call(alone, (False,) * 3), plain) < 1e-6
    for weights in (joined, alone):
        assert _relative(call(weights, (True,) * 3), plain + 1) < 1e-6
        some = call(weights, (True, False, True)) - plain
        assert torch.allclose(
            some,
            torch.cat([torch.full((64,), v) for v in (1.0,)] + [torch.zeros(32), torch.ones(32)])
            .to(device)
            .expand_as(some),
            atol=1e-5,
        )


def test_dropout_on_fp8_weights(device: str) -> None:
    """The adapter's input is dropped, the base's is not; backward uses the same mask."""
    w = quantize_weight(_random(device, 48, 64) / 8)
    p = _projection(device, w, 4, 1)
    z = _random(device, 32, 64).requires_grad_()
    assert p.b is not None
    with torch.no_grad():
        p.b.zero_()
    y = lora_linear(z, Projection(w, None, p.a, p.b, 2.0, dropout=0.5), norm=_norm(device, 64), backend="triton")
    plain = lora_linear(z, Projection(w), norm=_norm(device, 64), backend="triton")
    assert torch.equal(y, plain)
    (dz,) = torch.autograd.grad(y.sum(), z)
    (wanted,) = torch.autograd.grad(plain.sum(), z)
    assert _relative(dz, wanted) < 1e-6

    # The adapter's own share of the gradient of z goes through the mask: nothing where z was dropped.
    with torch.no_grad():
        p.b.normal_()
    y = lora_linear(z, Projection(w, None, p.a, p.b, 2.0, dropout=0.5), backend="triton")
    (dz,) = torch.autograd.grad(y.sum(), z)
    (wanted,) = torch.autograd.grad(lora_linear(z, Projection(w), backend="triton").sum(), z)
    assert 0.4 < float((dz == wanted).float().mean()) < 0.6


def test_whatever_is_saved_gives_the_same_bits(device: str) -> None:
    """Norm, rows and products are formed again in backward; the quantized rows are those of the forward."""
    weights = _weights(device, [(96, 64), (96, 64), (64, 96)], 2)
    linear = _weights(device, [(48, 64)], 1)
    dtype = BF16 if device == "cuda" else F32

    def mlp(save: Any) -> list[Tensor]:
        def call(z: Tensor, p: list[Projection], norm: Norm, backend: Any) -> list[Tensor]:
            y = lora_mlp(z, *p, norm=norm, residual="add", save=save, backend=backend)
            assert isinstance(y, Tensor)
            return [y]

        return _run(call, device, weights, dtype, "triton")

    def one(save: Any) -> list[Tensor]:
        return _run(
            lambda z, p, norm, backend: [lora_linear(z, p[0], norm=norm, save=save, backend=backend)],
            device,
            linear,
            dtype,
            "triton",
        )

    for found, wanted in (
        (mlp("gate_up_once"), mlp("gate_up")),
        (mlp("input"), mlp("gate_up")),
        (one("input"), one("products")),
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("adapter", [F32, BF16], ids=str)
@pytest.mark.parametrize("stream", [F32, BF16, torch.float16], ids=str)
def test_every_dtype_of_stream_and_adapters(
    device: str, stream: torch.dtype, adapter: torch.dtype, autocast: bool
) -> None:
    """Products in autocast's dtype or the stream's; each gradient in the dtype of what it belongs to."""
    weights = _weights(device, [(96, 64), (96, 64), (64, 96)], 2)
    made = [_projection(device, w, 4, seed) for seed, w in enumerate(weights)]
    leaves = [t.detach().to(adapter).requires_grad_() for p in made for t in (p.a, p.b) if t is not None]
    pairs = zip(leaves[::2], leaves[1::2], strict=True)
    projections = [Projection(w, None, a, b, 2.0) for w, (a, b) in zip(weights, pairs, strict=True)]
    z = _random(device, 2, 6, 64).to(stream).requires_grad_()
    with torch.autocast(torch.device(device).type, dtype=BF16, enabled=autocast):
        y = lora_mlp(z, *projections, norm=_norm(device, 64))
    assert isinstance(y, Tensor)
    assert y.dtype == (BF16 if autocast else stream)
    grads = torch.autograd.grad(y.float().square().sum(), [z, *leaves])
    assert [g.dtype for g in grads] == [stream, *[adapter] * 6]
    assert all(bool(torch.isfinite(g).all()) and bool(g.any()) for g in grads)
