"""A checkpointing policy is a row: a made-up one is estimated, set on the layers, and gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.checkpoint import checkpoint

from ftcli.plan.memory.checkpointing import HeldBytes, LayerBytes, Offloaded, input_alone
from ftcli.tables import code_of, policies
from ftcli.tables.policies import Policy
from tests.e2e.conftest import User


def held(layer: LayerBytes, offloaded: Offloaded) -> HeldBytes:
    """The made-up policy: a layer's input and one number besides."""
    found = input_alone(layer, offloaded)
    return HeldBytes(found.kept + 1.0, found.workspace, found.host)


def apply(layers: Sequence[Any], offloaded: Offloaded) -> int:
    """Checkpoints every layer as transformers does."""
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    return len(layers)


@pytest.fixture
def user(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> User:
    row = Policy(1.4, 1.5, f"{__name__}:held", f"{__name__}:apply")
    monkeypatch.setattr(policies, "TABLE", {**policies.TABLE, "made-up": row})
    return User(tmp_path, capsys)


def test_a_made_up_policy_trains_with_the_same_bits(user: User) -> None:
    losses = []
    for name, policy in (("kept", False), ("again", "made-up")):
        train = {"max_steps": 3, "gradient_checkpointing": policy}
        losses.append(user.done("train", user.recipe(name, train=train))["train_loss"])
    assert losses[0] == losses[1]


def test_its_memory_is_counted(user: User) -> None:
    sizes = {}
    for policy in (True, "made-up"):
        recipe = user.recipe(f"r-{policy}", train={"max_steps": 1, "gradient_checkpointing": policy})
        sizes[policy] = user.done("check", recipe)["memory"]["parts"]["activations"]
    recipe = user.recipe("r", train={"max_steps": 1, "gradient_checkpointing": "made"})
    status, _ = user.run("check", recipe)
    assert status == 2
    assert sizes["made-up"] > sizes[True]


def test_every_code_reference_resolves() -> None:
    for row in policies.TABLE.values():
        for reference in (row.held, row.apply):
            assert reference is None or callable(code_of(reference))


def test_the_fastest_comes_first_and_costs_nothing() -> None:
    assert policies.row(False).time == 1.0
    assert all(row.time > 1.0 for name, row in policies.TABLE.items() if name is not False)
