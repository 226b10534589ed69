"""Weights without memory are left undrawn, and all others are what they are without that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import initialization

from ftcli.empty_weights import Undrawn


class Called(TorchFunctionMode):
    """Remembers what is called in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def small() -> list[nn.Module]:
    """Modules of torch's that draw, and a weight that transformers draws."""
    made: list[nn.Module] = [nn.Linear(4, 3), nn.Embedding(5, 4), nn.LayerNorm(4), nn.Conv1d(2, 2, 3)]
    with initialization.guard_torch_init_functions():
        initialization.normal_(made[0].weight, std=0.02)
    return made


DRAWING = {"uniform_", "normal_", "kaiming_uniform_"}


@pytest.mark.parametrize("left_out", [True, False])
def test_what_has_no_memory_is_not_drawn(left_out: bool) -> None:
    with Called() as called, torch.device("meta"):
        if left_out:
            with Undrawn():
                made = small()
        else:
            made = small()
    assert bool(called.names & DRAWING) is not left_out
    assert all(parameter.is_meta for module in made for parameter in module.parameters())


def test_what_has_memory_is_drawn_as_ever() -> None:
    torch.manual_seed(3)
    plain, after = small(), torch.rand(1)
    torch.manual_seed(3)
    with Undrawn():
        found = small()
    assert torch.equal(torch.rand(1), after)
    pairs = [zip(one.parameters(), two.parameters(), strict=True) for one, two in zip(plain, found, strict=True)]
    assert all(torch.equal(one, two) for pair in pairs for one, two in pair)
