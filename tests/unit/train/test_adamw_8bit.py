"""Our AdamW with moments in 8 bits, as an optimizer: which parameters it is for, and its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ftcli.plan.trained import TrainedMatrices, bytes_of
from ftcli.tables import code_of, optimizers
from ftcli.train.adamw import AdamW, AdamW8bit

SHAPES = {"hidden": (70, 100), "small": (40, 100), "embedding": (70, 100), "norm": (5000,)}


def made(kind: type[AdamW] = AdamW8bit) -> tuple[dict[str, nn.Parameter], AdamW]:
    torch.manual_seed(0)
    found = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    hidden = [found["hidden"], found["small"]]
    groups: list[dict[str, Any]] = [
        {"params": hidden, "hidden": True},
        {"params": [found["embedding"], found["norm"]], "hidden": False, "weight_decay": 0.0},
    ]
    return found, kind(groups, lr=1e-2, rounding="nearest")


def steps(parameters: dict[str, nn.Parameter], optimizer: AdamW, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def test_the_table_names_it() -> None:
    name = optimizers.row("adamw_8bit").build_own
    assert name is not None
    assert code_of(name) is AdamW8bit


def test_matrices_of_layers_have_moments_in_8_bits_and_nothing_else_has() -> None:
    """By the rule that the memory estimate counts with, byte for byte."""
    parameters, optimizer = made()
    steps(parameters, optimizer, range(1))
    row = optimizers.row("adamw_8bit")
    for name, part in (("hidden", "hidden"), ("small", "hidden"), ("embedding", "embedding")):
        state = optimizer.state[parameters[name]]
        held = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
        counted = bytes_of(row, TrainedMatrices(*SHAPES[name], 1, part))  # type: ignore[arg-type]
        assert held == pytest.approx(counted, rel=1e-2)
        assert (state["exp_avg"].dtype == torch.uint8) == (name == "hidden")
    assert optimizer.state[parameters["norm"]]["exp_avg"].dtype == torch.float32


def test_it_goes_the_way_of_adamw_in_32_bits() -> None:
    """After one step parameters are the same: it is computed from moments that were not rounded yet. Then nearly."""
    (ours, eight), (theirs, whole) = made(), made(AdamW)
    start = {name: parameter.detach().clone() for name, parameter in ours.items()}
    steps(ours, eight, range(1))
    steps(theirs, whole, range(1))
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=1e-7)
    steps(ours, eight, range(1, 20))
    steps(theirs, whole, range(1, 20))
    for name, parameter in ours.items():
        way = (theirs[name] - start[name]).norm()
        assert (parameter - theirs[name]).norm() <= (0.05 if name == "hidden" else 1e-6) * way


def test_state_comes_back_to_the_last_bit() -> None:
    parameters, optimizer = made()
    steps(parameters, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    steps(parameters, optimizer, range(3, 5))
    again, other = made()
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(values[name])
    other.load_state_dict(saved)
    steps(again, other, range(3, 5))
    assert all(torch.equal(parameter, parameters[name]) for name, parameter in again.items())


def test_state_of_another_optimizer_is_refused() -> None:
    parameters, optimizer = made()
    steps(parameters, optimizer, range(1))
    saved = optimizer.state_dict()
    saved["state"][0] = {"step": 1, "state1": torch.zeros(70, 100), "state2": torch.zeros(70, 100)}
    with pytest.raises(ValueError, match=r"not of this optimizer for a parameter of \(70, 100\)"):
        made()[1].load_state_dict(saved)
    in_8_bits = made()[1]
    steps(parameters, optimizer, range(1))
    saved = optimizer.state_dict()
    del saved["state"][0]["exp_avg_scales"]
    with pytest.raises(ValueError, match="not of this optimizer"):
        in_8_bits.load_state_dict(saved)
