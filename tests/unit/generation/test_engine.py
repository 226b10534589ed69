"""Greedy completions are those of transformers' generate, for every family; rows do not see each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ftkernels.limits import CACHE_PAGE
from ftkernels.sampling import GREEDY, Sampling, row_seed
from torch import Tensor

from ftcli.facts.generation import EngineLayout, pages_of
from ftcli.generation.cache import Decode
from ftcli.generation.decoding import Forward, why_no_graphs
from ftcli.generation.engine import Engine
from ftcli.generation.generator import open_generator
from ftcli.generation.requests import GenerationRequest, NotFinite, StopCheck, StopConditions
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from ftcli.tables.families import MULTIMODAL, TABLE
from tests.small_models import MULTIMODAL as SMALL_MULTIMODAL
from tests.small_models import build, by_kind

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
LONGEST = 120
#: Every family that has a row: by itself, or as the language model of a multimodal checkpoint.
FAMILIES = sorted(
    {name for name in TABLE if not name.endswith(("vl_text", "vl_moe_text", "glimmer_text"))}
    | {name for name, row in MULTIMODAL.items() if row.text in TABLE and name in SMALL_MULTIMODAL}
)


def engine_of(model: Any, rows: int = 4, pages: int | None = None) -> Engine:
    return Engine(
        Forward(model, PLAN, CPU), EngineLayout(rows, pages or rows * pages_of(LONGEST) + 1, False), LONGEST, PLAN, CPU
    )


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [3, 70, 1, 64, 20, 33, 65, 40][:count]
    return [tuple(torch.randint(5, 250, (size,), generator=generator).tolist()) for size in sizes]


def generated(model: Any, prompt: Sequence[int], limit: int, stop: int = -1) -> list[int]:
    """transformers' own, one prompt at a time."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False,
            eos_token_id=[stop], pad_token_id=0,
        )  # fmt: skip
    found = out[0, len(prompt) :].tolist()
    return found[: found.index(stop) + 1] if stop in found else found


@pytest.mark.parametrize("model_type", by_kind(FAMILIES))
def test_greedy_is_generates(model_type: str) -> None:
    """Past windows and pages, with rows that enter while others are under way; on their layers, then on ours."""
    model = build(model_type).requires_grad_(False)
    asked = prompts(6)
    limits = [20, 4, 18, 3, 1, 6]
    expected = [generated(model, prompt, limit) for prompt, limit in zip(asked, limits, strict=True)]
    assert len({token for one in expected for token in one}) > 5
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(asked, limits, strict=True)]
    family = TABLE[model.config.get_text_config().model_type]
    ours_only = family.attention_alone or family.delta_nets is not None or family.latents is not None
    for kernels in ("reference",) if ours_only else ("off", "reference"):
        patch(model, kernels)
        found = engine_of(model, rows=3).complete(requests)
        assert [one[0].tokens for one in found] == expected, kernels
        assert {one[0].ended for one in found} == {"limit"}


@pytest.mark.parametrize(
    ("model_type", "kernels", "captured"),
    [
        ("llama", "off", True),
        ("qwen3_moe", "off", False),
        ("qwen3_moe", "reference", True),
        ("gpt_oss", "off", False),
        ("gpt_oss", "reference", True),
    ],
)
def test_transformers_own_experts_are_not_captured(model_type: str, kernels: Any, captured: bool) -> None:
    """They read on the host how many tokens each has, which ends a capture with an error; asked of no GPU."""
    model = build(model_type).requires_grad_(False)
    patch(model, kernels)
    forward = Forward(model, PLAN, CPU)
    assert (why_no_graphs(forward, torch.device("cuda"), wanted=True) is None) is captured
    assert why_no_graphs(forward, torch.device("cuda"), wanted=False) is not None
    assert engine_of(model).stepper.status.stopped == "CUDA graphs need a GPU"


@pytest.fixture(scope="module")
def model() -> Any:
    return build("gemma2").requires_grad_(False)


def tokens(
    engine: Engine, requests: list[GenerationRequest], sampling: Sampling = GREEDY, **stops: Any
) -> list[list[list[int]]]:
    stopping = StopCheck(StopConditions(**stops), None)
    return [[one.tokens for one in each] for each in engine.complete(requests, sampling, stopping)]


def test_a_stop_token_ends_a_row_and_another_takes_its_place(model: Any) -> None:
    asked, limit = prompts(8), 40
    free = [generated(model, prompt, limit) for prompt in asked]
    stop = free[0][7]
    expected = [one[: one.index(stop) + 1] if stop in one else one for one in free]
    assert generated(model, asked[0], limit, stop) == expected[0]
    assert any(len(one) < limit for one in expected)
    engine = engine_of(model, rows=3)
    found = engine.complete(
        [GenerationRequest(prompt, limit) for prompt in asked],
        stopping=StopCheck(StopConditions(frozenset({stop})), None),
    )
    assert [one[0].tokens for one in found] == expected
    assert [one[0].ended for one in found] == ["stop" if one[-1] == stop else "limit" for one in expected]
    assert engine._tools.pool.free == engine.layout.pages - 1


def test_a_prompt_of_several_completions_is_computed_once(model: Any) -> None:
    """And its pages are shared, whether it fills its last page or not."""
    calls: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, out: calls.append(out.shape[1]))
    sampling = Sampling(1.0)
    for size in (64, 70, 5):
        prompt = tuple(range(5, 5 + size))
        seeds = tuple(row_seed(size, at) for at in range(5))
        alone = [
            tokens(engine_of(model, rows=1), [GenerationRequest(prompt, 10, (seed,))], sampling)[0][0] for seed in seeds
        ]
        calls.clear()
        # Few pages: completions take turns.
        engine = engine_of(model, rows=4, pages=pages_of(size) + 2 * pages_of(size + 10) + 2)
        assert tokens(engine, [GenerationRequest(prompt, 10, seeds)], sampling)[0] == alone
        assert [count for count in calls if count > 1] == [size]
        assert len({tuple(one) for one in alone}) == 5
        assert engine._tools.pool.free == engine.layout.pages - 1
    hook.remove()


def test_rows_of_a_prompt_are_told_the_pages_that_they_share(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, while rows end and others take their places: each row stands in one line, with equal pages."""
    told: list[int] = []

    def decode(self: Forward, ids: Tensor, positions: Tensor, cached: Decode, shifts: Tensor) -> Tensor:
        shared = cached.shared
        assert shared is not None
        lines = [[row for row in line if row >= 0] for line in shared.members.tolist()]
        assert sorted(row for line in lines for row in line) == (cached.lengths > 0).nonzero()[:, 0].tolist()
        for line in lines:
            counts = {int(shared.pages[row]) for row in line}
            assert len(counts) <= 1
            told.extend(counts)
            for row in line:
                assert torch.equal(cached.table[row, : max(counts)], cached.table[line[0], : max(counts)])
                assert max(counts) * CACHE_PAGE < cached.lengths[row]
        return plain(self, ids, positions, cached, shifts)

    plain = Forward.decode
    monkeypatch.setattr(Forward, "decode", decode)
    requests = [
        GenerationRequest(tuple(range(5, 5 + size)), 6 + size % 5, tuple(row_seed(size, at) for at in range(count)))
        for size, count in ((64, 9), (70, 2), (5, 3), (111, 1))
    ]
    engine = engine_of(model, rows=12)
    together = tokens(engine, requests, Sampling(1.0))
    assert set(told) == {0, 1}
    monkeypatch.setattr(Forward, "decode", plain)
    assert together == [tokens(engine_of(model), [request], Sampling(1.0))[0] for request in requests]
    engine.complete(requests[3:])
    assert not engine._tools.batch.shares, "one completion each: there is nothing to share"


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text"])
def test_one_row_at_a_time_takes_the_completions_of_a_prompt_in_turns(model_type: str) -> None:
    """The end of the prompt has a page of its own beside the row's, which the engine lacked where rows filled it."""
    model = build(model_type).requires_grad_(False)
    patch(model, "reference")
    opened = open_generator(model, PLAN, CPU, rows=1, longest=LONGEST, pad=0)
    assert opened.reason is None
    request = GenerationRequest(tuple(range(5, 75)), LONGEST - 70, (1, 2, 3))
    (found,) = opened.generator.complete([request], Sampling(1.0))
    assert [len(one.tokens) for one in found] == [LONGEST - 70] * 3


def test_what_is_sampled_depends_on_its_seed_alone(model: Any) -> None:
    sampling = Sampling(0.9, top_k=40, top_p=0.95)
    requests = [GenerationRequest(prompt, 12, (row_seed(9, at),)) for at, prompt in enumerate(prompts(6))]
    alone = [tokens(engine_of(model, rows=1), [request], sampling)[0] for request in requests]
    engine = engine_of(model, rows=6)
    assert tokens(engine, requests, sampling) == alone
    assert tokens(engine, requests[::-1], sampling) == alone[::-1]
    assert tokens(engine_of(model, rows=2), requests, sampling) == alone


def test_the_log_probabilities_are_the_models_own(model: Any) -> None:
    (prompt, *_), sampling = prompts(1), Sampling(0.8)
    (found,) = engine_of(model).complete([GenerationRequest(prompt, 20, (3,))], sampling)[0]
    ids = torch.tensor([[*prompt, *found.tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / 0.8
    exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(found.logprobs).double(), exact, atol=1e-4)


def test_a_stop_string_ends_with_the_token_that_completes_it(model: Any) -> None:
    from transformers import AutoTokenizer

    from ftcli.assets import asset

    tokenizer = AutoTokenizer.from_pretrained(asset("tokenizers", "bytes"))
    prompt = prompts(1)[0]
    free = engine_of(model).complete([GenerationRequest(prompt, 60, (5,))], Sampling(1.5))[0][0]
    texts = [tokenizer.decode(free.tokens[: at + 1]) for at in range(60)]
    stop = tokenizer.decode(free.tokens[20:23])
    first = next(at for at, text in enumerate(texts) if stop in text)
    stopping = StopCheck(StopConditions(strings=("\ufffe never", stop)), tokenizer)
    (found,) = engine_of(model).complete([GenerationRequest(prompt, 60, (5,))], Sampling(1.5), stopping)[0]
    assert (found.tokens, found.ended) == (free.tokens[: first + 1], "stop")
    with pytest.raises(ValueError, match="tokenizer"):
        StopCheck(StopConditions(strings=("x",)), None)


def test_closing_gives_everything_back(model: Any) -> None:
    engine = engine_of(model)
    model.train()
    run = engine.run([GenerationRequest(prompt, 50) for prompt in prompts(6)])
    for _ in range(9):
        next(run)
    assert not model.training
    run.close()
    assert model.training
    assert model.config._attn_implementation != "ftcli"
    assert engine._tools.pool.free == engine.layout.pages - 1
    model.eval()


def test_logits_that_are_not_finite_end_it(model: Any) -> None:
    norm = model.model.norm.weight
    before = norm.data.clone()
    norm.data[3] = float("nan")
    try:
        with pytest.raises(NotFinite):
            engine_of(model).complete([GenerationRequest((5, 6, 7), 3)])
    finally:
        norm.data.copy_(before)


def test_a_request_that_does_not_fit_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="do not fit 120"):
        engine_of(model).complete([GenerationRequest(tuple(range(5, 105)), 21)])
    for bad in ({"prompt": ()}, {"limit": 0}, {"seeds": ()}):
        with pytest.raises(ValueError, match="a request has a prompt"):
            GenerationRequest(**{"prompt": (1,), "limit": 1, "seeds": (0,), **bad})


@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_adapters_answer_unmerged(kernels: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(build("llama").requires_grad_(False), LoraConfig(target_modules="all-linear", r=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.eval()
    asked = prompts(4)
    expected = [generated(adapted, prompt, 20) for prompt in asked]
    patch(adapted, kernels)
    assert [
        one[0] for one in tokens(engine_of(adapted), [GenerationRequest(prompt, 20) for prompt in asked])
    ] == expected
    with adapted.disable_adapter():
        base = [one[0] for one in tokens(engine_of(adapted), [GenerationRequest(prompt, 20) for prompt in asked])]
    assert base != expected
