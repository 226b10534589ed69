"""Rotary embedding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.rope import apply_rope, apply_rope_reference


def _angles(batch: int, seq_len: int, features: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as transformers makes them: two equal halves."""
    half = torch.rand(batch, seq_len, features // 2, device=device) * 6
    angle = torch.cat((half, half), dim=-1)
    return angle.cos(), angle.sin()


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize(("batch", "seq_len", "head", "rotated", "shared"), [
    (1, 1, 2, 2, True), (2, 3, 16, 16, True), (2, 5, 24, 24, False), (2, 3, 20, 12, False),
])  # fmt: skip
def test_rope_matches_float64(
    device: str, tools: Any, batch: int, seq_len: int, head: int, rotated: int, shared: bool
) -> None:
    q, k = (torch.randn(batch, seq_len, n * head, device=device) for n in (6, 2))
    cos, sin = (torch.randn(1 if shared else batch, seq_len, rotated, device=device) for _ in range(2))

    def call(function: Any, **kwargs: Any) -> Any:
        return lambda q, k: function(_heads(q, 6), _heads(k, 2), cos.to(q.dtype), sin.to(q.dtype), **kwargs)

    tools.assert_float32(call(apply_rope, backend="triton"), call(apply_rope_reference), (q, k))


def test_bfloat16_is_as_good_as_torch(device: str, tools: Any) -> None:
    q, k = (torch.randn(2, 4, n * 32, device=device) for n in (4, 1))
    cos, sin = _angles(2, 4, 32, device)

    def call(function: Any, **kwargs: Any) -> Any:
        return lambda q, k: function(_heads(q, 4), _heads(k, 1), cos, sin, **kwargs)

    tools.assert_bfloat16(call(apply_rope, backend="triton"), call(apply_rope_reference), (q, k), torch.bfloat16)


def test_backward_is_the_inverse_rotation(device: str) -> None:
    q = torch.randn(1, 2, 3, 16, device=device, requires_grad=True)
    cos, sin = _angles(1, 3, 16, device)
    turned, _ = apply_rope(q, q.detach(), cos, sin, backend="triton")
    (back,) = torch.autograd.grad(turned, q, turned.detach())
    assert torch.allclose(back, q, atol=1e-5)


def test_results_keep_the_memory_order_of_their_inputs(device: str) -> None:
    q = _heads(torch.randn(2, 3, 4 * 16, device=device), 4)
    cos, sin = _angles(1, 3, 16, device)
    turned, _ = apply_rope(q, q, cos, sin, backend="triton")
    assert turned.transpose(1, 2).is_contiguous()
    assert turned.data_ptr() != q.data_ptr()


def test_positions_of_packed_documents_are_the_callers(device: str) -> None:
    """Two documents packed in one row, each from position 0, turn as they would alone."""
    x = torch.randn(1, 2, 6, 16, device=device)
    cos, sin = _angles(1, 3, 16, device)
    packed, _ = apply_rope(x, x, torch.cat((cos, cos), 1), torch.cat((sin, sin), 1), backend="triton")
    for part in (slice(0, 3), slice(3, 6)):
        alone, _ = apply_rope(x[:, :, part], x[:, :, part], cos, sin, backend="triton")
        assert torch.equal(packed[:, :, part], alone)


def test_no_tokens(device: str) -> None:
    q = torch.randn(1, 2, 0, 16, device=device)
    cos = torch.randn(1, 0, 16, device=device)
    assert apply_rope(q, q, cos, cos, backend="triton")[0].shape == q.shape


@pytest.mark.parametrize(("q", "cos"), [((1, 2, 3, 8), (1, 4, 8)), ((1, 2, 3, 8), (1, 3, 7)), ((1, 2, 3, 8), (1, 3, 10)), ((2, 3, 8), (1, 3, 8))])  # fmt: skip  # noqa: E501
def test_bad_shapes_are_named(q: tuple[int, ...], cos: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected"):
        apply_rope(torch.ones(q), torch.ones(q), torch.ones(cos), torch.ones(cos))
