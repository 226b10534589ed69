"""Experts with adapters against float64, each expert in turn: every routing, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.experts import ExpertStack, lora_experts, lora_experts_reference
from torch import Tensor

BF16 = torch.bfloat16


def routing(tokens: int, experts: int, top: int, kind: str, device: str) -> Tensor:
    """(tokens, top): random; all to the same experts; or none to half of the experts."""
    if kind == "one":
        return torch.arange(top, device=device).expand(tokens, top)
    scores = torch.rand(tokens, experts, device=device)
    if kind == "half":
        scores[:, ::2] = -1.0
    return scores.topk(top, dim=-1).indices


def inputs_of(
    experts: int, top: int, hidden: int, width: int, rank: int, tokens: int, device: str
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    at = {"device": device}
    adapters = [
        torch.randn(experts * rank, hidden, **at) / hidden**0.5,
        torch.randn(2 * width, rank * experts, **at) / rank**0.5,
        torch.randn(experts * rank, width, **at) / width**0.5,
        torch.randn(hidden, rank * experts, **at) / rank**0.5,
    ]
    stacks = (
        torch.randn(experts, 2 * width, hidden, **at) / hidden**0.5,
        torch.randn(experts, hidden, width, **at) / width**0.5,
    )
    return [torch.randn(tokens, hidden, **at), torch.rand(tokens, top, **at), *(adapters if rank else [])], stacks


def call(function: Any, index: Tensor, stacks: tuple[Tensor, Tensor], **options: Any) -> Any:
    def of(x: Tensor, weights: Tensor, *adapters: Tensor) -> Tensor:
        experts = stacks[0].shape[0]
        pairs = (adapters[:2], adapters[2:]) if adapters else ((None, None), (None, None))
        first, second = (
            ExpertStack(w.to(x.dtype), experts, *pair, scaling=0.5) for w, pair in zip(stacks, pairs, strict=True)
        )
        out: Tensor = function(x, index, weights, first, second, **options)
        return out

    return of


@pytest.mark.parametrize("kind", ["random", "one", "half"])
@pytest.mark.parametrize(
    ("experts", "top", "hidden", "width", "rank", "tokens"),
    [(4, 2, 64, 32, 16, 37), (5, 3, 48, 40, 3, 50), (8, 1, 64, 64, 0, 9)],
    ids=str,
)
def test_output_and_every_gradient(
    device: str, tools: Any, kind: str, experts: int, top: int, hidden: int, width: int, rank: int, tokens: int
) -> None:
    inputs, stacks = inputs_of(experts, top, hidden, width, rank, tokens, device)
    index = routing(tokens, experts, top, kind, device)
    op, reference = (
        call(lora_experts, index, stacks, backend="triton"),
        call(lora_experts_reference, index, stacks),
    )
    tools.assert_float32(op, reference, inputs)
    tools.assert_float32(call(lora_experts, index, stacks, backend="torch"), reference, inputs)


@pytest.mark.parametrize("kind", ["random", "one"])
def test_in_half_precision(device: str, tools: Any, kind: str) -> None:
    inputs, stacks = inputs_of(8, 2, 128, 64, 16, 300, device)
    index = routing(300, 8, 2, kind, device)
    stacks = tuple(w.to(BF16).float() for w in stacks)
    op, reference = call(lora_experts, index, stacks, backend="triton"), call(lora_experts_reference, index, stacks)
    tools.assert_bfloat16(op, reference, inputs, BF16)


def test_the_input_alone_is_saved_with_the_same_bits(device: str, tools: Any) -> None:
    inputs, stacks = inputs_of(4, 2, 64, 32, 16, 37, device)
    index = routing(37, 4, 2, "random", device)
    kept, again = (call(lora_experts, index, stacks, backend="triton", save=save) for save in ("gate_up", "input"))
    dtypes = [torch.float32] * len(inputs)
    for one, other in zip(tools.run(kept, inputs, dtypes), tools.run(again, inputs, dtypes), strict=True):
        assert torch.equal(one, other)
