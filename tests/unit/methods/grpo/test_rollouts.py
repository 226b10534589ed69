"""Completions for GRPO: of the weights as they are, drawn by the run's seed, the step and the row's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.generation.engine import Engine
from ftcli.generation.fallback import TransformersGenerator
from ftcli.methods.grpo.rollouts import Rollouts
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.plan.precision import DtypePlan
from ftcli.reporting import SilentReporter
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
PROMPTS = [[5, 6, 7]] * 4 + [[9, 10]] * 4


def rollouts(model: Any, seed: int = 0, **settings: Any) -> Rollouts:
    recipe = SimpleNamespace(run=SimpleNamespace(seed=seed), model=SimpleNamespace(kernels="off"))
    report = SimpleNamespace(
        memory=SimpleNamespace(generator="kept", waiting=0), device=SimpleNamespace(available_bytes=None)
    )
    job: Any = SimpleNamespace(
        recipe=recipe,
        report=report,
        dtypes=PLAN,
        device=torch.device("cpu"),
        stops=(4,),
        pad_token_id=0,
        reporter=SilentReporter(),
    )
    return Rollouts(model, job, GrpoConfig(max_prompt_length=8, max_completion_length=12, **settings))


def tokens(ours: Rollouts, prompts: list[list[int]], step: int) -> list[list[int]]:
    return [one.tokens for one in ours.complete(prompts, step)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama").requires_grad_(False)


def test_the_seed_the_step_and_the_place_decide(model: Any) -> None:
    found = tokens(rollouts(model), PROMPTS, 3)
    assert tokens(rollouts(model), PROMPTS, 3) == found
    assert len({tuple(tokens) for tokens in found}) == 8
    assert all(0 < len(tokens) <= 12 for tokens in found)
    assert tokens(rollouts(model, seed=1), PROMPTS, 3) != found
    one = rollouts(model)
    assert tokens(one, PROMPTS, 3) == found
    assert tokens(one, PROMPTS, 3) != found  # a second time within a step
    assert tokens(one, PROMPTS, 4) == tokens(rollouts(model), PROMPTS, 4) != found
    alone = tokens(rollouts(model), PROMPTS[:1], 3)
    assert alone == found[:1]
    part = [one.tokens for one in rollouts(model).complete(PROMPTS, 3, slice(3, 6))]
    assert part == found[3:6], "what a rank draws of all is what one process draws"


def test_equal_neighbours_are_computed_once(model: Any) -> None:
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    tokens(rollouts(model), PROMPTS, 0)
    hook.remove()
    assert seen[0] == 5


def test_what_has_been_learnt_is_sampled(model: Any) -> None:
    ours = rollouts(model)
    before = tokens(ours, PROMPTS, 0)
    bias = model.model.norm.weight
    kept = bias.data.clone()
    bias.data.mul_(torch.linspace(-2, 2, bias.numel()))
    after = tokens(ours, PROMPTS, 1)
    assert after == tokens(rollouts(model), PROMPTS, 1) != before
    bias.data.copy_(kept)


@pytest.mark.parametrize(("model_type", "kind"), [("mamba", TransformersGenerator), ("gemma2", Engine)])
def test_any_model_is_sampled(model_type: str, kind: Any) -> None:
    ours = rollouts(build(model_type), top_k=20, top_p=0.9)
    found = tokens(ours, PROMPTS, 0)
    assert ours._opened is not None
    assert isinstance(ours._opened.generator, kind)
    assert len(found) == 8
    assert all(4 not in tokens[:-1] and len(tokens) <= 12 for tokens in found)
