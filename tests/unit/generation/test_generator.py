"""Who generates, and why; transformers' generate answers as the engine does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ftkernels.sampling import Sampling

from ftcli.generation.engine import Engine
from ftcli.generation.fallback import TransformersGenerator
from ftcli.generation.generator import open_generator
from ftcli.generation.requests import GenerationRequest, NotFinite, StopCheck, StopConditions
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")


def opened(model: Any, **settings: Any) -> Any:
    return open_generator(model, PLAN, CPU, rows=3, longest=100, pad=0, **settings)


@pytest.mark.parametrize(
    ("model_type", "change", "reason"),
    [
        ("llama", {}, None),
        ("mamba", {}, "mamba"),
        ("deepseek_v3", {}, "deepseek_v3"),
        ("qwen3_5_text", {}, "no states of ours"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_who_generates(model_type: str, change: dict[str, Any], reason: str | None) -> None:
    found = opened(build(model_type, **change))
    assert isinstance(found.generator, Engine if reason is None else TransformersGenerator)
    assert found.reason is None if reason is None else reason in found.reason
    assert found.summary == "generation: the engine" if reason is None else reason in found.summary


def test_settings_of_the_model_count_where_they_are_asked_for() -> None:
    model = build("llama")
    model.generation_config.repetition_penalty = 1.1
    assert "repetition_penalty 1.1" in opened(model).reason
    assert opened(model, own_settings=False).reason is None


def test_transformers_answers_as_the_engine_does() -> None:
    """Batch by batch and alone; stop tokens, and limits of each row."""
    model = build("qwen2").requires_grad_(False).train()
    prompts = [(5, 6, 7), tuple(range(9, 40)), (100,), (7, 8), tuple(range(30, 50))]
    requests = [GenerationRequest(prompt, 20 - 3 * at) for at, prompt in enumerate(prompts)]
    engine = opened(model).generator
    free = engine.complete(requests)
    stopping = StopCheck(StopConditions(frozenset({free[0][0].tokens[5]})), None)
    for rows in (1, 2, 5):
        ours = TransformersGenerator(model, PLAN, CPU, pad=0, rows=rows)
        for chosen in (None, stopping):
            found, expected = ours.complete(requests, stopping=chosen), engine.complete(requests, stopping=chosen)
            assert [(one.tokens, one.ended) for (one,) in found] == [(one.tokens, one.ended) for (one,) in expected]
    assert model.training


def test_closing_it_ends_the_thread_that_generates() -> None:
    model = build("llama").requires_grad_(False)
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    tokens = TransformersGenerator(model, PLAN, CPU, pad=0, rows=1).run([GenerationRequest((5, 6), 200)], Sampling(1.0))
    next(tokens)
    tokens.close()
    hook.remove()
    assert 0 < len(calls) < 150


def test_a_seed_repeats_what_transformers_samples_and_leaves_torchs_numbers_alone() -> None:
    model = build("mamba").requires_grad_(False)
    generator = TransformersGenerator(model, PLAN, CPU, pad=0, rows=2)
    state = torch.random.get_rng_state()
    first, again, other = (
        [
            one.tokens
            for one in generator.complete([GenerationRequest((5, 6), 9, seeds)], Sampling(1.0, 30, 0.9, 0.01))[0]
        ]
        for seeds in ((1, 2), (1, 2), (3, 4))
    )
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_is_not_finite_ends_transformers_too() -> None:
    model = build("mamba").requires_grad_(False)
    model.get_output_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(NotFinite):
        opened(model).generator.complete([GenerationRequest((5, 6), 3)])


def test_no_room_for_one_sequence_is_said_as_torch_says_it() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="no room for the key-value cache of 100 tokens"):
        opened(build("llama"), room_bytes=1000)
