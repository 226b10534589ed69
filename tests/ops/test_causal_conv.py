"""The causal convolution against float64: widths, documents, strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ftkernels.causal_conv import causal_conv, causal_conv_reference, inputs_at
from torch import Tensor


def kernels(*given: Tensor, **options: Any) -> Tensor:
    return causal_conv(*given, backend="triton", **options)


def tensors(device: str, batch: int, length: int, channels: int, width: int) -> list[Tensor]:
    shapes = [(batch, length, channels), (channels, width), (channels,)]
    return [torch.randn(shape, device=device) for shape in shapes]


#: Rows shorter than the filter; more tokens and channels than a tile; every width's ends.
SHAPES = [(2, 70, 70, 4), (1, 2, 5, 4), (1, 1, 3, 8), (2, 33, 64, 8), (1, 9, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients(device: str, tools: Any, shape: Any) -> None:
    tools.assert_float32(kernels, causal_conv_reference, tensors(device, *shape))


def test_documents_that_begin_anywhere(device: str, tools: Any) -> None:
    """A row for each place, across the edge of a tile of tokens; the document after it is shorter than the filter."""
    places, tokens = torch.arange(12)[:, None] + 24, torch.arange(40)[None]
    starts = torch.where(tokens < places, 0, torch.where(tokens < places + 2, places, places + 2)).int().to(device)
    given = tensors(device, 12, 40, 8, 4)
    tools.assert_float32(partial(kernels, starts=starts), partial(causal_conv_reference, starts=starts), given)
    out = kernels(*given, starts=starts)
    for row, place in enumerate((24, 29, 35)):
        alone = kernels(given[0][place - 24 : place - 23, place : place + 2], *given[1:])
        assert torch.equal(out[place - 24 : place - 23, place : place + 2], alone), row


def test_the_reference_is_what_torch_convolves() -> None:
    x, weight, bias = (t.double() for t in tensors("cpu", 2, 20, 6, 4))
    z = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=6)[..., :20]
    assert torch.allclose(causal_conv_reference(x, weight, bias), torch.nn.functional.silu(z).transpose(1, 2))
    assert torch.allclose(
        causal_conv_reference(x, weight),
        torch.nn.functional.silu(z - bias[:, None]).transpose(1, 2),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_better_than_torchs_own(device: str, tools: Any, dtype: torch.dtype) -> None:
    def own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        z = torch.nn.functional.conv1d(x.transpose(1, 2), weight[:, None], bias, padding=3, groups=40)
        return torch.nn.functional.silu(z[..., : x.shape[1]]).transpose(1, 2)

    given = [t.to(dtype) for t in tensors(device, 2, 40, 40, 4)]
    exact = tools.run(own, given, [torch.float64] * 3)
    got = tools.run(kernels, given, [dtype] * 3)
    plain = tools.run(own, given, [dtype] * 3)
    for value, theirs, truth in zip(got, plain, exact, strict=True):
        assert value.dtype == dtype
        assert tools.relative(value, truth) <= min(1.5 * tools.relative(theirs, truth), 1e-2)


def test_views_no_bias_and_a_frozen_filter(device: str, tools: Any) -> None:
    """A slice of a wider projection, and the gradient of x alone."""
    weight = torch.randn(16, 4, device=device)

    def sliced(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda both: function(both[..., 8:24], weight.to(both.dtype))

    tools.assert_float32(sliced(kernels), sliced(causal_conv_reference), (torch.randn(2, 10, 40, device=device),))
    x = torch.randn(2, 16, 10, device=device, requires_grad=True)  # channels apart
    ours, theirs = (
        torch.autograd.grad(function(x.transpose(1, 2), weight).sum(), x)[0]
        for function in (kernels, causal_conv_reference)
    )
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_two_runs_give_the_same_bits_and_no_tokens_no_launch(device: str, tools: Any) -> None:
    given = tensors(device, 2, 70, 20, 4)
    first, again = (tools.run(kernels, given, [torch.bfloat16] * 3) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    empty = tools.run(kernels, (given[0][:, :0], *given[1:]), [torch.float32] * 3)
    assert not empty[2].any()


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.zeros(1, 4, 6), torch.zeros(6, 4)
    for given, options, words in (
        ((x, torch.zeros(6, 9)), {}, "2 to 8"),
        ((x, weight[:4]), {}, "expected x"),
        ((x.long(), weight), {}, "int64"),
        ((x, weight, torch.zeros(4)), {}, "bias"),
        ((x, weight), {"starts": torch.zeros(1, 4).long()}, "not int32"),
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
    for state, begin, end in zip(inputs_at(x, width, ends, starts), begins, ends.tolist(), strict=True):
        own = torch.cat([torch.zeros(width - 1, 5), x[0, begin : end + 1]])
        assert torch.equal(state, own[1 - width :].T)
    assert torch.equal(inputs_at(x, width, ends[-1:])[0], x[0, 1 - width :].T)
