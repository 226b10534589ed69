"""Heads of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.latent_heads import LatentSizes, latent_heads, latent_heads_reference
from ftkernels.rope import apply_rope_reference
from torch import Tensor

#: Even ones; such as no power of two divides, with values that are narrower; and more heads than a program has at once.
SIZES = (LatentSizes(2, 8, 8, 16), LatentSizes(5, 24, 12, 20), LatentSizes(9, 3, 2, 5))


def _inputs(sizes: LatentSizes, device: str, batch: int = 2, seq_len: int = 5) -> list[Tensor]:
    """q, kv and the keys' part that heads share."""
    q = torch.randn(batch, seq_len, sizes.heads * sizes.head, device=device)
    kv = torch.randn(batch, seq_len, sizes.heads * (sizes.plain + sizes.value), device=device)
    return [q, kv, torch.randn(batch, seq_len, sizes.rotated, device=device)]


def _angles(sizes: LatentSizes, device: str, batch: int = 1, seq_len: int = 5) -> tuple[Tensor, Tensor]:
    half = torch.rand(batch, seq_len, sizes.rotated // 2, device=device) * 6
    angle = torch.cat((half, half), dim=-1)
    return angle.cos(), angle.sin()


def _call(function: Callable[..., Any], sizes: LatentSizes, angles: tuple[Tensor, Tensor], **settings: Any) -> Any:
    return lambda q, kv, shared: function(q, kv, shared, *(x.to(q.dtype) for x in angles), sizes, **settings)


@pytest.mark.parametrize("layout", ["halves", "pairs"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("batch", [1, 2])
def test_kernels_match_float64(device: str, tools: Any, sizes: LatentSizes, layout: Any, batch: int) -> None:
    angles = _angles(sizes, device, batch)
    kernel = _call(latent_heads, sizes, angles, layout=layout, backend="triton")
    tools.assert_float32(kernel, _call(latent_heads_reference, sizes, angles, layout=layout), _inputs(sizes, device))


def test_bfloat16_is_as_good_as_torch(device: str, tools: Any) -> None:
    sizes = SIZES[1]
    angles = _angles(sizes, device)
    kernel, reference = (
        _call(latent_heads, sizes, angles, backend="triton"),
        _call(latent_heads_reference, sizes, angles),
    )
    tools.assert_bfloat16(kernel, reference, _inputs(sizes, device), torch.bfloat16)


def test_the_reference_is_the_formula(device: str) -> None:
    """Of one token and head, written out."""
    sizes = SIZES[1]
    (q, kv, shared), (cos, sin) = _inputs(sizes, device), _angles(sizes, device)
    made = latent_heads_reference(q, kv, shared, cos, sin, sizes, layout="pairs")
    b, s, h, n = 1, 3, 4, sizes.plain
    one = q[b, s].view(sizes.heads, -1)[h], kv[b, s].view(sizes.heads, -1)[h]
    turned = [
        apply_rope_reference(*[x.view(1, 1, 1, -1)] * 2, cos[:, s : s + 1], sin[:, s : s + 1], layout="pairs")
        for x in (one[0][n:], shared[b, s])
    ]  # fmt: skip
    assert torch.equal(made[0][b, h, s], torch.cat((one[0][:n], turned[0][0].flatten())))
    assert torch.equal(made[1][b, h, s], torch.cat((one[1][:n], turned[1][0].flatten())))
    assert torch.equal(made[2][b, h, s], torch.cat((one[1][n:], torch.zeros(16, device=device))))


@pytest.mark.parametrize("function", [latent_heads, latent_heads_reference])
def test_strided_inputs_and_gradients(device: str, function: Any) -> None:
    """Parts of one buffer, and gradients by head in memory, as attention gives them; results lie by token."""
    sizes = SIZES[1]
    settings = {"backend": "triton"} if function is latent_heads else {}
    inputs, angles = _inputs(sizes, device), _angles(sizes, device)
    joined = torch.cat(inputs, dim=-1)
    parts = joined.split([x.shape[-1] for x in inputs], dim=-1)
    call = _call(function, sizes, angles, **settings)
    found, wanted = call(*parts), call(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert all(x.transpose(1, 2).is_contiguous() for x in found)
    leaves = [x.clone().requires_grad_() for x in inputs]
    by_head = [torch.randn(x.shape, device=device) for x in wanted]
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in by_head]
    first, second = (torch.autograd.grad(call(*leaves), leaves, grads) for grads in (by_head, by_token))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_an_output_that_is_not_used_has_no_gradient(device: str) -> None:
    sizes = SIZES[0]
    leaves = [x.requires_grad_() for x in _inputs(sizes, device)]
    q, _, _ = _call(latent_heads, sizes, _angles(sizes, device), backend="triton")(*leaves)
    dq, d_kv, d_shared = torch.autograd.grad(q.sum(), leaves)
    assert bool(dq.any())
    assert not d_kv.any()
    assert not d_shared.any()


def test_no_tokens(device: str) -> None:
    sizes = SIZES[0]
    call = _call(latent_heads, sizes, _angles(sizes, device, seq_len=0), backend="triton")
    assert all(x.shape == (2, 2, 0, 16) for x in call(*_inputs(sizes, device, seq_len=0)))


@pytest.mark.parametrize(
    ("sizes", "change"),
    [
        (LatentSizes(2, 8, 7, 8), {}),
        (LatentSizes(2, 8, 8, 17), {}),
        (SIZES[0], {"q": (2, 5, 31)}),
        (SIZES[0], {"kv": (2, 4, 48)}),
        (SIZES[0], {"shared": (2, 5, 2, 8)}),
        (SIZES[0], {"cos": (1, 4, 8), "sin": (1, 4, 8)}),
        (SIZES[0], {"cos": (1, 5, 4), "sin": (1, 5, 4)}),
    ],
)
def test_bad_shapes_are_named(sizes: LatentSizes, change: dict[str, tuple[int, ...]]) -> None:
    shapes = {"q": (2, 5, 32), "kv": (2, 5, 48), "shared": (2, 5, 8), "cos": (1, 5, 8), "sin": (1, 5, 8), **change}
    with pytest.raises(ValueError, match=r"expected|no heads"):
        latent_heads(*(torch.ones(shape) for shape in shapes.values()), sizes)
