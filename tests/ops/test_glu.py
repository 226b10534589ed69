"""Gated linear units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ftkernels.glu import ACTIVATIONS, glu, glu_backward_torch, glu_reference


@pytest.mark.parametrize("shape", [(1, 1), (3, 127), (2, 5, 129)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_glu_matches_float64(device: str, tools: Any, activation: Any, shape: tuple[int, ...]) -> None:
    gate, up = (torch.randn(shape, device=device) * 3 for _ in range(2))
    tools.assert_float32(
        lambda g, u: glu(g, u, activation, backend="triton"), lambda g, u: glu_reference(g, u, activation), (gate, up)
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bfloat16_is_as_good_as_torch(device: str, tools: Any, activation: Any) -> None:
    gate, up = (torch.randn(8, 64, device=device) for _ in range(2))
    tools.assert_bfloat16(
        lambda g, u: glu(g, u, activation, backend="triton"),
        lambda g, u: glu_reference(g, u, activation),
        (gate, up),
        torch.bfloat16,
    )


def test_slices_of_one_projection_are_read_in_place(device: str, tools: Any) -> None:
    both = torch.randn(5, 2 * 33, device=device)
    tools.assert_float32(
        lambda x: glu(x[:, :33], x[:, 33:], "silu", backend="triton"),
        lambda x: glu_reference(x[:, :33], x[:, 33:], "silu"),
        (both,),
    )


def test_tanh_and_erf_forms_differ_as_torchs_do(device: str) -> None:
    gate, up = torch.randn(4, 50, device=device) * 3, torch.randn(4, 50, device=device)
    for activation, wanted in (
        ("gelu_tanh", F.gelu(gate, approximate="tanh")),
        ("gelu", F.gelu(gate)),
        ("silu", F.silu(gate)),
    ):
        assert torch.allclose(glu(gate, up, activation, backend="triton"), wanted * up, atol=1e-5)


def test_gelu_tanh_keeps_its_digits_where_one_plus_tanh_cancels(device: str) -> None:
    gate = torch.tensor([[-2.5, -3.0, -4.0, -1e-3, 1e-3, 4.0]], device=device)
    exact = gate.double().requires_grad_()
    inner = 0.7978845608028654 * (exact + 0.044715 * exact**3)
    (slope,) = torch.autograd.grad((exact * torch.sigmoid(2 * inner)).sum(), exact)
    leaf = gate.clone().requires_grad_()
    value = glu(leaf, torch.ones_like(leaf), "gelu_tanh", backend="triton")
    (grad,) = torch.autograd.grad(value.sum(), leaf)
    assert torch.allclose(value.detach().double(), gate.double() * torch.sigmoid(2 * inner.detach()), rtol=2e-6, atol=0)
    assert torch.allclose(grad.double(), slope, rtol=2e-5, atol=0)


def test_vllm_56578_large_inputs_saturate_and_are_not_nan(device: str) -> None:
    """tanh as a ratio of exponentials gives inf / inf."""
    gate = torch.tensor([[-1e9, -1e5, -200.0, 200.0, 1e5, 1e9]], device=device, requires_grad=True)
    up = torch.ones_like(gate)
    for activation in ("gelu_tanh", "silu"):
        y = glu(gate, up, activation, backend="triton")
        (grad,) = torch.autograd.grad(y.sum(), gate)
        assert torch.equal(y > 0, gate > 0)
        assert torch.allclose(grad, (gate > 0).float(), atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_backward_formulas(tools: Any, activation: Any) -> None:
    gate, up, dh = (torch.randn(4, 30) for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    exact = torch.autograd.grad(glu_reference(*leaves, activation), leaves, dh.double())
    both, h = glu_backward_torch(dh, gate, up, activation)
    assert tools.relative(both, torch.cat(exact, 1)) < 1e-5
    assert tools.relative(h, glu_reference(gate.double(), up.double(), activation)) < 1e-5


def test_gradcheck(device: str) -> None:
    gate, up = (torch.randn(1, 4, device=device, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for activation in ("silu", "gelu_tanh", "gelu"):
        assert torch.autograd.gradcheck(lambda g, u, a=activation: glu(g, u, a, backend="triton"), (gate, up))


def test_no_rows_and_mixed_dtypes(device: str) -> None:
    gate = torch.randn(0, 8, device=device, requires_grad=True)
    glu(gate, gate.detach(), "silu", backend="triton").sum().backward()
    assert gate.grad is not None
    mixed = glu(
        torch.ones(2, 8, device=device, dtype=torch.bfloat16), torch.ones(2, 8, device=device), "silu", backend="triton"
    )
    assert mixed.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="one shape"):
        glu(torch.ones(2, 3), torch.ones(2, 4), "silu")
    with pytest.raises(ValueError, match="activation"):
        glu(torch.ones(2, 3), torch.ones(2, 3), "swish")  # type: ignore[arg-type]
