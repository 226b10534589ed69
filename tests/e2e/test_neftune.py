"""`train.neftune_noise_alpha`: noise on the embeddings, in training only, drawn from the run's own generators."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.integrations import neftune

from ftcli.train import build
from tests.e2e.conftest import User

NOISE: dict[str, Any] = {"neftune_noise_alpha": 5.0, "max_steps": 5}
FEW = {**NOISE, "max_steps": 3}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_goes_on_to_the_last_bit(packing: bool, user: User) -> None:
    change: dict[str, Any] = {"data": {"packing": packing}, "eval": {"every_steps": 2, "samples": 0}}
    recipe = user.recipe("noisy", train=NOISE, checkpoint={"every_steps": 3}, **change)
    user.done("train", recipe)
    user.done("train", user.recipe("plain", train={"max_steps": 1}, data={**change["data"], "eval": []}))
    assert user.losses("noisy")[0] != user.losses("plain")[0]
    user.goes_on_alike("noisy", recipe)


def test_evaluations_are_without_noise_and_change_nothing(user: User) -> None:
    recipe = user.recipe("often", train=FEW, eval={"every_steps": 1})
    user.done("train", recipe)
    user.done("train", user.recipe("never", train=FEW))
    assert user.losses("often") == user.losses("never")
    held_out = [line["eval_loss"] for line in user.metrics("often") if "eval_loss" in line]
    told = user.done("eval", recipe, "--run", str(user.folder / "often"))
    assert told["run"]["loss"] == pytest.approx(held_out[-1], rel=1e-5)


def test_the_kernels_layers_see_the_same_noise(user: User) -> None:
    for kernels in ("off", "reference"):
        user.done("train", user.recipe(kernels, model={"kernels": kernels}, train=FEW, data={"eval": []}))
    assert user.losses("reference") == pytest.approx(user.losses("off"), rel=1e-4)


def test_the_noise_is_as_large_as_it_should_be(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training batch has it, the same numbers as by transformers' own hook, and no other batch has."""
    found: list[tuple[bool, float, float]] = []
    plain = build.add_noise

    def hook(alpha: float, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        states = torch.get_rng_state()
        noisy = plain(alpha, module, inputs, output)
        torch.set_rng_state(states)
        module.neftune_noise_alpha = alpha
        assert torch.equal(noisy, neftune.neftune_post_forward_hook(module, inputs, output))
        most = 5.0 / math.sqrt(output.shape[1] * output.shape[2])
        found.append((module.training, float((noisy - output).abs().max()), most))
        return noisy

    monkeypatch.setattr(build, "add_noise", hook)
    user.done("train", user.recipe("r", train=NOISE, eval={"every_steps": 2}))
    training = [(size, most) for trains, size, most in found if trains]
    assert len(training) == 5
    for size, most in training:
        assert 0.9 * most < size <= most * 1.0001
    assert all(size == 0.0 for trains, size, _ in found if not trains)


def test_grpo_refuses_it(user: User) -> None:
    grpo = {"rewards": [{"use": "contains"}], "num_generations": 4}
    status, document = user.run("grpo", user.recipe("g", train=NOISE, grpo=grpo))
    assert status == 2
    said = [f["message"] for f in document["findings"] if f["code"] == "FT250"]
    assert any("train.neftune_noise_alpha: 5.0 is not supported by GRPO" in message for message in said)
