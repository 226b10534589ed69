"""All between the projections of a gated delta net as one operation, against float64 and against its parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.delta_net import NetSizes, NetWeights, delta_net, delta_net_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiers import further, in_turn

BF16 = torch.bfloat16
#: Two value heads to a key head, one, three; sizes of keys and of values that differ.
SIZES = [NetSizes(2, 4, 64, 32), NetSizes(2, 2, 64, 16), NetSizes(2, 6, 32, 32)]


def inputs_of(sizes: NetSizes, device: str, *, rows: int = 2, length: int = 70, bias: bool = False) -> list[Tensor]:
    """What enters, and the weights: filter (its bias), A_log, dt_bias, norm."""
    channels, at = sum(sizes.parts[:3]), {"device": device}
    heads = sizes.value_heads
    return [
        torch.randn(rows, length, sum(sizes.parts), **at),
        torch.randn(channels, 4, **at) / 2,
        *([torch.randn(channels, **at)] if bias else []),
        torch.randn(heads, **at) - 2,
        torch.randn(heads, **at),
        1 + torch.randn(sizes.value_size, **at) / 4,
    ]


def call(function: Any, sizes: NetSizes, starts: Tensor | None = None, **options: Any) -> Any:
    def of(joined: Tensor, filter: Tensor, *rest: Tensor) -> Tensor:
        *bias, a_log, dt_bias, norm = rest
        weights = NetWeights(filter, bias[0] if bias else None, a_log, dt_bias, norm, 1e-6)
        out: Tensor = function(joined, weights, sizes, starts=starts, **options)
        return out

    return of


def documents(lengths: tuple[int, ...], device: str) -> Tensor:
    begins = torch.tensor([0, *lengths]).cumsum(0)[:-1].repeat_interleave(torch.tensor(lengths))
    return begins[None].int().to(device)


@pytest.mark.parametrize(("sizes", "bias"), in_turn(SIZES, [False, True]))
def test_output_and_every_gradient(device: str, tools: Any, sizes: NetSizes, bias: bool) -> None:
    op, reference = call(delta_net, sizes, backend="triton"), call(delta_net_reference, sizes)
    inputs = inputs_of(sizes, device, bias=bias)
    exact = tools.run(reference, inputs, [torch.float64] * len(inputs))
    found = tools.run(op, inputs, [torch.float32] * len(inputs))
    for place, (value, truth) in enumerate(zip(found, exact, strict=True), start=-len(exact)):
        assert tools.relative(value, truth) <= 1e-5, place


@pytest.mark.parametrize("lengths", [(30, 1, 2, 37), (64, 6), *further((3, 67), (61, 3, 6))], ids=str)
def test_documents(device: str, tools: Any, lengths: tuple[int, ...]) -> None:
    sizes, starts = SIZES[0], documents(lengths, device)
    op, reference = call(delta_net, sizes, starts, backend="triton"), call(delta_net_reference, sizes, starts)
    inputs = inputs_of(sizes, device, rows=1)
    tools.assert_float32(op, reference, inputs)
    alone = torch.cat(
        [call(delta_net, sizes, backend="triton")(x, *inputs[1:]) for x in inputs[0].split(lengths, 1)], 1
    )
    assert tools.relative(op(*inputs), alone) <= 1e-5


def test_in_half_precision(device: str, tools: Any) -> None:
    """Weights stay in float32, as full fine-tuning holds them."""
    sizes, inputs = SIZES[0], inputs_of(SIZES[0], device)
    op, reference = call(delta_net, sizes, backend="triton"), call(delta_net_reference, sizes)
    compared = tools.compare(op, reference, inputs, [BF16, *[torch.float32] * (len(inputs) - 1)])
    assert compared.error <= max(1.5 * compared.torch_error, 1e-2), compared


def test_strided_and_partly_frozen(device: str, tools: Any) -> None:
    """Of the weights only the norm's is trained; what enters is a slice of something wider."""
    sizes, (joined, *weights) = SIZES[0], inputs_of(SIZES[0], device)
    wide = torch.cat([joined, joined], -1)

    def run(function: Any, **options: Any) -> list[Tensor]:
        leaves = [wide.clone().requires_grad_(), weights[-1].clone().requires_grad_()]
        out = call(function, sizes, **options)(leaves[0][..., : joined.shape[-1]], *weights[:-1], leaves[1])
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    for found, wanted in zip(run(delta_net, backend="triton"), run(delta_net_reference), strict=True):
        assert tools.relative(found, wanted) <= 1e-5


def test_what_is_kept_and_nothing_is_copied(device: str) -> None:
    """The largest tensors are what enters and what the rule gives; no gradient is put together of parts."""
    sizes, inputs = SIZES[0], inputs_of(SIZES[0], device)
    leaves = [inputs[0].requires_grad_(), *inputs[1:]]
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(delta_net, sizes, backend="triton")(*leaves)
    tokens, heads = 2 * 70, sizes.value_heads
    wanted = [sum(sizes.parts) * tokens, heads * sizes.value_size * tokens, *[heads * tokens] * 2]
    assert sorted(kept) == sorted([*wanted, *[weight.numel() for weight in inputs[1:]]])
    called: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.autograd.grad(out, leaves[0], torch.ones_like(out))
    assert not [name for name in called if "cat" in name or "clone" in name]


def test_twice_the_same_bits(device: str, tools: Any) -> None:
    sizes, inputs = SIZES[0], inputs_of(SIZES[0], device)
    first, second = (
        tools.run(call(delta_net, sizes, backend="triton"), inputs, [torch.float32] * len(inputs)) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tokens_and_heads_that_the_kernels_do_not_take(device: str, tools: Any) -> None:
    inputs = inputs_of(SIZES[0], device, length=0)
    assert call(delta_net, SIZES[0], backend="triton")(*inputs).shape == (2, 0, 128)
    odd = NetSizes(2, 4, 24, 24)
    inputs = inputs_of(odd, device)
    assert torch.equal(call(delta_net, odd, backend="triton")(*inputs), call(delta_net_reference, odd)(*inputs))


def test_what_does_not_fit_is_refused() -> None:
    sizes, inputs = SIZES[0], inputs_of(SIZES[0], "cpu")
    with pytest.raises(ValueError, match="side by side"):
        call(delta_net, sizes)(inputs[0][..., 1:], *inputs[1:])
    with pytest.raises(ValueError, match="filter and norm"):
        call(delta_net, sizes)(inputs[0], inputs[1][1:], *inputs[2:])
