"""The causal convolution against float64: widths, documents, states, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftkernels.causal_conv import ConvOutput, causal_conv, causal_conv_reference, inputs_at
from torch import Tensor


def kernels(*given: Tensor, **options: Any) -> ConvOutput:
    return causal_conv(*given, backend="triton", **options)


def over(function: Callable[..., ConvOutput], **options: Any) -> Callable[..., tuple[Tensor, ...]]:
    """``function`` of x, weight, bias and perhaps a first state, with the last state."""

    def call(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor | None = None) -> tuple[Tensor, ...]:
        made = function(x, weight, bias, first=first, want_last=True, **options)
        assert made.last is not None
        return made.out, made.last

    return call


def tensors(device: str, batch: int, length: int, channels: int, width: int, state: bool) -> list[Tensor]:
    shapes = [(batch, length, channels), (channels, width), (channels,), (batch, channels, width - 1)]
    return [torch.randn(shape, device=device) for shape in shapes[: 4 if state else 3]]


#: Rows shorter than the filter; more tokens and channels than a tile; every width's ends.
SHAPES = [(2, 70, 70, 4), (1, 2, 5, 4), (1, 1, 3, 8), (2, 33, 64, 8), (1, 9, 3, 2)]


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_states_and_gradients(device: str, tools: Any, shape: Any, state: bool) -> None:
    tools.assert_float32(over(kernels), over(causal_conv_reference), tensors(device, *shape, state))


@pytest.mark.parametrize("state", [False, True])
def test_documents_that_begin_anywhere(device: str, tools: Any, state: bool) -> None:
    """A row for each place, across the edge of a tile of tokens; the document after it is shorter than the filter."""
    places, tokens = torch.arange(12)[:, None] + 24, torch.arange(40)[None]
    starts = torch.where(tokens < places, 0, torch.where(tokens < places + 2, places, places + 2)).int().to(device)
    given = tensors(device, 12, 40, 8, 4, state)
    tools.assert_float32(over(kernels, starts=starts), over(causal_conv_reference, starts=starts), given)
    out = kernels(*given[:3], starts=starts).out
    for row, place in enumerate((24, 29, 35)):
        alone = kernels(given[0][place - 24 : place - 23, place : place + 2], *given[1:3]).out
        assert torch.equal(out[place - 24 : place - 23, place : place + 2], alone), row


def test_the_reference_is_what_torch_convolves() -> None:
    x, weight, bias = (t.double() for t in tensors("cpu", 2, 20, 6, 4, False))
    z = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)[..., :20]
    assert torch.allclose(causal_conv_reference(x, weight, bias).out, torch.nn.functional.silu(z).transpose(1, 2))
    assert torch.allclose(
        causal_conv_reference(x, weight).out,
        torch.nn.functional.silu(z - bias[:, None]).transpose(1, 2),
    )


def test_a_row_in_two_calls(device: str) -> None:
    """The state of the first half goes into the second; documents that begin in neither's state get none of it."""
    x, weight, bias = tensors(device, 2, 20, 6, 4, False)
    whole = kernels(x, weight, bias).out
    for cut in (1, 2, 3, 10):
        head = kernels(x[:, :cut], weight, bias, want_last=True)
        tail = kernels(x[:, cut:], weight, bias, first=head.last)
        assert torch.allclose(torch.cat([head.out, tail.out], 1), whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_better_than_torchs_own(device: str, tools: Any, dtype: torch.dtype) -> None:
    def own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=40)
        return torch.nn.functional.silu(z[..., : x.shape[1]]).transpose(1, 2)

    given = [t.to(dtype) for t in tensors(device, 2, 40, 40, 4, False)]
    exact = tools.run(own, given, [torch.float64] * 3)
    got = tools.run(lambda *t: kernels(*t).out, given, [dtype] * 3)
    plain = tools.run(own, given, [dtype] * 3)
    for value, theirs, truth in zip(got, plain, exact, strict=True):
        assert value.dtype == dtype
        assert tools.relative(value, truth) <= min(1.5 * tools.relative(theirs, truth), 1e-2)


def test_views_no_bias_and_a_frozen_filter(device: str, tools: Any) -> None:
    """A slice of a wider projection, and the gradient of x alone."""
    weight = torch.randn(16, 4, device=device)

    def sliced(function: Callable[..., ConvOutput]) -> Callable[..., Tensor]:
        return lambda both: function(both[..., 8:24], weight.to(both.dtype)).out

    tools.assert_float32(sliced(kernels), sliced(causal_conv_reference), (torch.randn(2, 10, 40, device=device),))
    x = torch.randn(2, 16, 10, device=device, requires_grad=True)  # channels apart
    ours, theirs = (
        torch.autograd.grad(function(x.transpose(1, 2), weight).out.sum(), x)[0]
        for function in (kernels, causal_conv_reference)
    )
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_two_runs_give_the_same_bits_and_no_tokens_no_launch(device: str, tools: Any) -> None:
    given = tensors(device, 2, 70, 20, 4, True)
    first, again = (tools.run(over(kernels), given, [torch.bfloat16] * 4) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    empty = tools.run(over(kernels), (given[0][:, :0], *given[1:]), [torch.float32] * 4)
    assert torch.equal(empty[1], given[3])
    assert not empty[3].any()


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(1, 4, 6), torch.zeros(6, 4)
    for given, options, words in (
        ((x, torch.zeros(6, 9)), {}, "2 to 8"),
        ((x, weight[:4]), {}, "expected x"),
        ((x.long(), weight), {}, "int64"),
        ((x, weight, torch.zeros(4)), {}, "bias"),
        ((x, weight), {"starts": torch.zeros(1, 4).long()}, "not int32"),
        ((x, weight), {"first": torch.zeros(1, 6, 4)}, "first state"),
    ):
        with pytest.raises(ValueError, match=words):
            causal_conv(*given, **options)


@pytest.mark.parametrize("width", [2, 4])
def test_inputs_at_the_ends_of_documents(width: int) -> None:
    """Documents shorter than the filter leave zeros before them."""
    x, begins = torch.randn(1, 20, 5), [0, 1, 3, 10]
    lengths = [1, 2, 7, 10]
    starts = torch.tensor(begins).repeat_interleave(torch.tensor(lengths))[None].int()
    ends = torch.tensor([b + n - 1 for b, n in zip(begins, lengths, strict=True)], dtype=torch.int32)
    found = inputs_at(x, width, ends, starts)
    for state, begin, length in zip(found, begins, lengths, strict=True):
        alone = causal_conv(x[:, begin : begin + length], torch.ones(5, width), want_last=True, backend="torch").last
        assert torch.equal(state[None], alone)
    whole = causal_conv(x, torch.ones(5, width), want_last=True, backend="torch").last
    assert torch.equal(inputs_at(x, width, ends[-1:]), whole)
