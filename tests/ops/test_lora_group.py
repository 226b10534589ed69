"""Projections side by side, of any number and size, and queries that come with the gates of attention's output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.lora_group import lora_group, lora_group_reference
from ftkernels.lora_qkv import lora_gated_qkv, lora_gated_qkv_reference
from ftkernels.projection import Norm, Projection
from torch import Tensor

from tests.tiers import in_turn

#: Inputs over which errors in bfloat16 are averaged, beside the first ones.
DRAWS = 7
#: Of a gated delta net, small: queries, keys and values; gate; strength and decay.
SIZES = (50, 24, 3, 3)


def group(function: Any, layers: list[Any], form: Any, **options: Any) -> Any:
    def call(z: Tensor, *rest: Tensor) -> Any:
        leaves = list(rest)
        norm = Norm(leaves.pop(0), 1e-5, form) if form else None
        pairs = [(leaves.pop(0), leaves.pop(0)) if layer.a is not None else (None, None) for layer in layers]
        return function(z, [x.build(*pair, z) for x, pair in zip(layers, pairs, strict=True)], norm=norm, **options)

    return call


@pytest.mark.parametrize(
    ("ranks", "form"),
    in_turn([(4, 4, 4, 4), (16, 0, 3, 20), (0, 0, 0, 0), (80, 80, 80, 80)], [None, "llama", "gemma"]),
)
def test_a_group_matches_float64(device: str, tools: Any, layers: Any, form: Any, ranks: tuple[int, ...]) -> None:
    made = [layers.make(n, 40, r, bias=r == 3) for n, r in zip(SIZES, ranks, strict=True)]

    def drawn() -> list[Tensor]:
        norm = [torch.randn(40, device=device)] if form else []
        return [torch.randn(2, 5, 40, device=device), *norm, *layers.flat(*made)]

    inputs, reference = drawn(), group(lora_group_reference, made, form)
    for backend in ("triton", "torch"):
        tools.assert_float32(group(lora_group, made, form, backend=backend), reference, inputs)
    ours = group(lora_group, made, form, backend="triton")
    tools.assert_bfloat16_in_the_mean(ours, reference, [inputs, *(drawn() for _ in range(DRAWS))])


def test_trained_weights_have_gradients(device: str, tools: Any) -> None:
    weights = [torch.randn(n, 40, device=device) / 40**0.5 for n in SIZES]

    def call(function: Any, **options: Any) -> Any:
        return lambda z, w, *rest: function(z, [Projection(x) for x in rest], norm=Norm(w, 1e-5, "gemma"), **options)

    inputs = [torch.randn(2, 5, 40, device=device), torch.randn(40, device=device), *weights]
    tools.assert_float32(call(lora_group, backend="triton"), call(lora_group_reference), inputs)


def test_only_the_residual_may_have_a_gradient(device: str, layers: Any) -> None:
    z = torch.randn(2, 5, 40, device=device, requires_grad=True)
    made = [layers.make(n, 40, 4) for n in SIZES]
    built = [x.build(*(t.requires_grad_() for t in (x.a, x.b)), z) for x in made]
    _, residual = lora_group(z, built, norm=Norm(torch.ones(40, device=device), 1e-5), backend="triton")
    (grad,) = torch.autograd.grad(residual, z, 2 * torch.ones_like(z))
    assert torch.equal(grad, 2 * torch.ones_like(z))


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="projection 1: weight"):
        lora_group(torch.zeros(1, 8), [Projection(torch.zeros(4, 8)), Projection(torch.zeros(4, 9))])


def gated(function: Any, made: list[Any], rope: Any, **options: Any) -> Any:
    def call(z: Tensor, w: Tensor, wq: Tensor, wk: Tensor, *rest: Tensor) -> Any:
        leaves = list(rest)
        pairs = [(leaves.pop(0), leaves.pop(0)) if layer.a is not None else (None, None) for layer in made]
        norms = Norm(wq, 1e-5, "gemma"), Norm(wk, 1e-5, "gemma")
        angles = None if rope is None else tuple(t.to(z.dtype) for t in rope)
        built = [layer.build(*pair, z) for layer, pair in zip(made, pairs, strict=True)]
        given = {"head_dim": 16, "norm": Norm(w, 1e-5, "gemma"), "head_norms": norms, "rope": angles}
        return tuple(function(z, *built, **given, **options))

    return call


@pytest.mark.parametrize(("rotated", "rank"), in_turn([None, 4, 16], [4, 0, 80]))
def test_queries_with_their_gates(device: str, tools: Any, layers: Any, rotated: int | None, rank: int) -> None:
    """Four heads of queries and gates in turn, two of keys and values; the first features of a head are rotated."""
    made = [layers.make(n, 40, rank, bias=True) for n in (2 * 4 * 16, 2 * 16, 2 * 16)]
    rope = None if rotated is None else layers.angles(rotated)

    def drawn() -> list[Tensor]:
        weights = [torch.randn(n, device=device) for n in (40, 16, 16)]
        return [torch.randn(2, 5, 40, device=device), *weights, *layers.flat(*made)]

    inputs, reference = drawn(), gated(lora_gated_qkv_reference, made, rope)
    for backend in ("triton", "torch"):
        tools.assert_float32(gated(lora_gated_qkv, made, rope, backend=backend), reference, inputs)
    ours = gated(lora_gated_qkv, made, rope, backend="triton")
    tools.assert_bfloat16_in_the_mean(ours, reference, [inputs, *(drawn() for _ in range(DRAWS))])


def test_they_are_transformers(device: str) -> None:
    """Qwen3.5's attention takes the halves of each head of its q projection for the query and its gate."""
    q = torch.randn(2 * 4 * 16, 40, device=device)
    k, v = torch.randn(2, 2 * 16, 40, device=device)
    z = torch.randn(2, 5, 40, device=device)
    found = lora_gated_qkv_reference(z, *(Projection(w) for w in (q, k, v)), head_dim=16)
    query, gate = torch.chunk((z @ q.T).view(2, 5, -1, 32), 2, dim=-1)
    assert torch.equal(found.q, query.transpose(1, 2))
    assert torch.equal(found.gate, gate)


def test_rows_that_make_no_heads_are_refused() -> None:
    q, kv = Projection(torch.zeros(3 * 16, 40)), Projection(torch.zeros(16, 40))
    with pytest.raises(ValueError, match=r"do not make heads of 16"):
        lora_gated_qkv(torch.zeros(1, 2, 40), q, kv, kv, head_dim=16)
