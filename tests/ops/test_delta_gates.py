"""Gates and gated norm of delta nets against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.delta_gates import Gates, delta_gates, delta_gates_reference, gated_norm, gated_norm_reference
from torch import Tensor


def gates(*given: Tensor) -> Gates:
    return delta_gates(*given, backend="triton")


def norm(*given: Tensor) -> Tensor:
    return gated_norm(*given, 1e-6, backend="triton")


def norm_reference(*given: Tensor) -> Tensor:
    return gated_norm_reference(*given, 1e-6)


@pytest.mark.parametrize("shape", [(2, 33, 6), (1, 1, 1), (1, 300, 32), (7, 48)])
def test_gates(device: str, tools: Any, shape: tuple[int, ...]) -> None:
    given = [4 * torch.randn(shape, device=device) for _ in range(2)]
    given += [torch.randn(shape[-1], device=device) for _ in range(2)]
    tools.assert_float32(gates, delta_gates_reference, given)


def test_gates_are_what_transformers_writes() -> None:
    a, b, a_log, dt_bias = (torch.randn(2, 5, 4), torch.randn(2, 5, 4), torch.randn(4), torch.randn(4))
    made = delta_gates_reference(a, b, a_log, dt_bias)
    softplus = torch.nn.functional.softplus(a.float() + dt_bias)
    assert torch.allclose(made.g, -a_log.float().exp() * softplus, rtol=1e-6)
    assert torch.equal(made.beta, b.sigmoid())


def test_gates_of_half_precision_are_float32(device: str, tools: Any) -> None:
    """Views of one projection [b | a], as qwen3_next has them; every element right to float32."""
    both = (8 * torch.randn(2, 9, 12, device=device)).bfloat16().requires_grad_()
    a_log, dt_bias = torch.randn(6, device=device), torch.randn(6, device=device)
    made = gates(both[..., 6:], both[..., :6], a_log, dt_bias)
    exact = delta_gates_reference(both[..., 6:].double(), both[..., :6].double(), a_log.double(), dt_bias.double())
    for value, truth in zip(made, exact, strict=True):
        assert value.dtype == torch.float32
        assert torch.allclose(value.double(), truth, rtol=1e-5, atol=1e-37)
    grad, true = (torch.autograd.grad(sum(t.sum() for t in of), both)[0] for of in (made, exact))
    assert grad.dtype == torch.bfloat16
    assert tools.relative(grad, true) < 4e-3


@pytest.mark.parametrize("shape", [(2, 33, 3, 48), (1, 1, 1, 5), (5, 128), (3, 200)])
def test_norm(device: str, tools: Any, shape: tuple[int, ...]) -> None:
    given = [
        torch.randn(shape, device=device),
        torch.randn(shape, device=device),
        torch.randn(shape[-1], device=device),
    ]
    tools.assert_float32(norm, norm_reference, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_in_half_precision_is_better_than_transformers(device: str, tools: Any, dtype: torch.dtype) -> None:
    def own(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """Qwen3_5RMSNormGated; in float64 without its rounding to float32."""
        acc = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(acc)
        n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((weight * n.to(x.dtype)) * torch.nn.functional.silu(z.to(acc))).to(x.dtype)

    given = [torch.randn(s, device=device).to(dtype) for s in ((2, 9, 4, 32), (2, 9, 4, 32), (32,))]
    exact = tools.run(own, given, [torch.float64] * 3)
    got, plain = (tools.run(f, given, [dtype] * 3) for f in (norm, own))
    for value, theirs, truth in zip(got, plain, exact, strict=True):
        assert value.dtype == dtype
        assert tools.relative(value, truth) <= min(1.5 * tools.relative(theirs, truth), 1e-2)


def test_norm_of_views_and_a_frozen_weight(device: str, tools: Any) -> None:
    weight = torch.randn(16, device=device)

    def joined(function: Any) -> Any:
        """z out of a wider projection, x as (B, H, S, D) memory."""
        return lambda x, z: function(x.transpose(1, 2), z[..., 32:96].unflatten(-1, (4, 16)), weight.to(x.dtype))

    given = torch.randn(2, 4, 5, 16, device=device), torch.randn(2, 5, 128, device=device)
    tools.assert_float32(joined(norm), joined(norm_reference), given)
    leaves = [torch.randn(2, 5, 4, 16, device=device, requires_grad=True) for _ in range(2)]
    ours, theirs = (torch.autograd.grad(f(*leaves, weight).sum(), leaves) for f in (norm, norm_reference))
    for one, other in zip(ours, theirs, strict=True):  # sum() brings a gradient of stride 0
        assert torch.allclose(one, other, atol=1e-5)


def test_two_runs_give_the_same_bits_and_no_tokens_no_launch(device: str, tools: Any) -> None:
    x, z = (torch.randn(2, 70, 3, 16, device=device) for _ in range(2))
    a, b = (torch.randn(2, 70, 3, device=device) for _ in range(2))
    weight, per_head = torch.randn(16, device=device), torch.randn(3, device=device)
    for function, given in ((norm, (x, z, weight)), (gates, (a, b, per_head, per_head))):
        first, again = (tools.run(function, given, [torch.bfloat16] * len(given)) for _ in range(2))
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        empty = tools.run(function, (given[0][:, :0], given[1][:, :0], *given[2:]), [torch.float32] * len(given))
        assert empty[0].numel() == 0
        assert not empty[-1].any()


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(1, 4, 6)
    with pytest.raises(ValueError, match="A_log"):
        delta_gates(x, x, torch.zeros(6), torch.zeros(5))
    with pytest.raises(ValueError, match="do not fit"):
        gated_norm(x, x, torch.zeros(5), 1e-6)
