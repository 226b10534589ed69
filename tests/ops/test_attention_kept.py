"""A checkpoint's second forward takes attention's output from the first one, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from ftkernels.attention import KeptOutput, attention
from ftkernels.attention_mask import AttentionMask
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _leaves(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 21, 4, 16), (2, 21, 2, 16), (2, 21, 2, 16))
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


def _layer(kept: KeptOutput | None) -> Callable[..., Tensor]:
    """Attention between two operations that keep something for backward, as in a decoder layer."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.sin().transpose(1, 2) for x in (q, k, v))
        mask = AttentionMask.causal_mask(9)
        out = attention(*heads_first, mask, scale=0.25, softcap=5.0, backend="triton", kept=kept)
        return out.transpose(1, 2).square()

    return run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    module = import_module("ftkernels.attention")
    found: list[None] = []
    forward = module.attention_forward

    def counting(*args: Any) -> Any:
        found.append(None)
        return forward(*args)

    monkeypatch.setattr(module, "attention_forward", counting)
    return found


def test_the_second_forward_runs_no_attention_and_gives_the_same_bits(device: str, launches: list[None]) -> None:
    leaves = _leaves(device)
    wanted = torch.autograd.grad(_layer(None)(*leaves).sum(), leaves)
    launches.clear()
    taken: list[Tensor] = []

    def keep(tensor: Tensor) -> Callable[[], Tensor]:
        assert tensor.is_contiguous()
        copy = tensor.detach().clone()

        def fetch() -> Tensor:
            taken.append(copy)
            return copy

        return fetch

    out = checkpoint(_layer(KeptOutput(keep)), *leaves, use_reentrant=False)
    assert len(launches) == 1
    found = torch.autograd.grad(out.sum(), leaves)
    assert len(launches) == len(taken) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_second_backward_computes_it_again(device: str, launches: list[None]) -> None:
    leaves = _leaves(device)
    out = checkpoint(_layer(KeptOutput(lambda tensor: lambda: tensor)), *leaves, use_reentrant=False)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert len(launches) == 1
    again = torch.autograd.grad(out.sum(), leaves)
    assert len(launches) == 2
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_without_a_checkpoint_it_changes_nothing(device: str, launches: list[None]) -> None:
    leaves = _leaves(device)
    wanted = torch.autograd.grad(_layer(None)(*leaves).sum(), leaves)
    found = torch.autograd.grad(_layer(KeptOutput(lambda tensor: lambda: tensor))(*leaves).sum(), leaves)
    assert len(launches) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
