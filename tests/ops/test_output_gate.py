"""Gated attention output against float64: gates a feature and a head, where projections leave them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.output_gate import output_gate, output_gate_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def kernels(x: Tensor, gate: Tensor) -> Tensor:
    return output_gate(x, gate, backend="triton")


#: The second has more heads than one program takes, and the last no power of two of anything.
SHAPES = [(2, 3, 4, 16), (1, 2, 24, 256), (1, 1, 1, 1), (3, 5, 3, 24)]


@pytest.mark.parametrize("form", ["feature", "flat", "head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients(device: str, tools: Any, shape: tuple[int, ...], form: str) -> None:
    batch, length, heads, size = shape
    x = torch.randn(shape, device=device)
    sizes = {"feature": (heads, size), "flat": (heads * size,), "head": (heads,)}[form]
    gate = 3 * torch.randn((batch, length, *sizes), device=device)
    tools.assert_float32(kernels, output_gate_reference, (x, gate))


def test_the_reference_is_what_transformers_writes() -> None:
    x, gate = torch.randn(2, 3, 4, 8).double(), torch.randn(2, 3, 4, 8).double()
    flat = x.reshape(2, 3, 32) * torch.sigmoid(gate.reshape(2, 3, 32))  # qwen3_5, muse_glimmer
    assert torch.equal(output_gate_reference(x, gate).flatten(2), flat)
    assert torch.equal(output_gate_reference(x, gate.flatten(2)).flatten(2), flat)
    by_head = x * torch.sigmoid(gate[..., 0]).unsqueeze(-1)  # lfm3
    assert torch.equal(output_gate_reference(x, gate[..., 0]), by_head)


def joined(function: Callable[..., Tensor], form: str) -> Callable[..., Tensor]:
    """``function`` of views of one (2, 5, 128) tensor, and of attention's output as (B, H, S, D) memory."""

    def run(memory: Tensor, fused: Tensor) -> Tensor:
        if form == "by head":  # [q | gate] of each of 4 heads of 16
            gate = fused.unflatten(-1, (4, 32))[..., 16:]
        elif form == "beside":
            gate = fused[..., 40:104]
        elif form == "a head":
            gate = fused[..., 7:11]
        else:  # a head's gates of all tokens next to each other
            gate = fused.transpose(1, 2).contiguous().transpose(1, 2)[..., 3:7]
        return function(memory.transpose(1, 2), gate)

    return run


@pytest.mark.parametrize("form", ["by head", "beside", "a head", "a head, apart"])
def test_views_of_one_projection(device: str, tools: Any, form: str) -> None:
    tensors = torch.randn(2, 4, 5, 16, device=device), torch.randn(2, 5, 128, device=device)
    tools.assert_float32(joined(kernels, form), joined(output_gate_reference, form), tensors)


class Copies(TorchDispatchMode):
    """Names of operations that copy a tensor; the interpreter's own are named otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("clone", "_to_copy"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["by head", "beside", "a head"])
def test_views_are_read_in_place(device: str, form: str) -> None:
    leaves = [torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 4, 5, 16), (2, 5, 128))]
    with Copies() as copies:
        out = joined(kernels, form)(*leaves)
    assert not copies.found
    assert out.is_contiguous()
    with Copies() as copies:
        x = leaves[0].detach().transpose(1, 2).requires_grad_()
        gate = leaves[1].detach().unflatten(-1, (4, 32))[..., 16:].requires_grad_()
        torch.autograd.grad(kernels(x, gate), (x, gate), torch.ones(2, 5, 4, 16, device=device))
    assert not copies.found


@pytest.mark.parametrize("form", ["by head", "a head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_better_than_torchs_own(device: str, tools: Any, form: str, dtype: torch.dtype) -> None:
    def own(x: Tensor, gate: Tensor) -> Tensor:
        share = torch.sigmoid(gate)
        return x * (share if gate.dim() == 4 else share[..., None])

    tensors = [t.to(dtype) for t in (torch.randn(2, 4, 33, 16, device=device), torch.randn(2, 33, 128, device=device))]
    exact, got, theirs = (
        tools.run(joined(function, form), tensors, [of] * 2)
        for function, of in ((own, torch.float64), (kernels, dtype), (own, dtype))
    )
    for value, plain, truth in zip(got, theirs, exact, strict=True):
        assert value.dtype == dtype
        assert tools.relative(value, truth) <= min(1.5 * tools.relative(plain, truth), 1e-2)


def test_dtypes_that_differ(device: str, tools: Any) -> None:
    """Autocast may leave the gate in bfloat16 beside a float32 output."""
    x, gate = torch.randn(1, 3, 2, 16, device=device), torch.randn(1, 3, 2, device=device).bfloat16()
    leaves = [x.requires_grad_(), gate.requires_grad_()]
    out = kernels(*leaves)
    dx, d_gate = torch.autograd.grad(out.square().sum(), leaves)
    assert (out.dtype, dx.dtype, d_gate.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    exact = output_gate_reference(x.double(), gate.double())
    assert tools.relative(out.detach(), exact.detach()) < 1e-6
    assert tools.relative(dx, torch.autograd.grad(exact.square().sum(), x)[0]) < 1e-6


def test_gates_far_from_zero(device: str) -> None:
    """Without the cancellation of 1 - sigmoid: right to float32 wherever the gradient is a float32 number."""
    gate = torch.tensor([-200.0, -80.0, -20.0, -8.0, 0.0, 8.0, 20.0, 80.0, 200.0], device=device).requires_grad_()
    out = kernels(torch.ones(1, 1, 9, 2, device=device), gate[None, None])
    (grad,) = torch.autograd.grad(out.sum(), gate)
    wide = gate.detach().double()
    slope = 2 * torch.sigmoid(wide) * torch.sigmoid(-wide)
    assert torch.allclose(grad.double(), slope, rtol=1e-6, atol=1e-37)
    assert torch.allclose(out[0, 0, :, 0].double(), torch.sigmoid(wide), rtol=1e-6, atol=1e-37)


def test_gradients_without_contiguous_features(device: str) -> None:
    """``out.sum().backward()`` brings an expanded gradient, all strides 0."""
    leaves = [torch.randn(2, 3, 4, 16, device=device, requires_grad=True) for _ in range(2)]
    ours, theirs = (
        torch.autograd.grad(function(*leaves).sum(), leaves) for function in (kernels, output_gate_reference)
    )
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_two_runs_give_the_same_bits_and_no_tokens_no_launch(device: str, tools: Any) -> None:
    tensors = torch.randn(2, 7, 5, 48, device=device), torch.randn(2, 7, 5, device=device)
    first, again = (tools.run(kernels, tensors, [torch.bfloat16] * 2) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    empty = tools.run(kernels, (tensors[0][:, :0], tensors[1][:, :0]), [torch.float32] * 2)
    assert [t.shape[1] for t in empty] == [0, 0, 0]


@pytest.mark.parametrize("gate", [torch.zeros(2, 3, 5), torch.zeros(2, 3, 4, 1), torch.zeros(3, 2, 4), torch.zeros(2, 3, 4).long()])  # fmt: skip  # noqa: E501
def test_what_does_not_fit_is_refused(gate: Tensor) -> None:
    for function in (output_gate, output_gate_reference):
        with pytest.raises(ValueError, match=r"neither a number|expected floating"):
            function(torch.zeros(2, 3, 4, 8), gate)
    with pytest.raises(ValueError, match="expected floating x"):
        output_gate(torch.zeros(2, 3, 32), gate)
