"""Layers that carry a state from token to token (Qwen3.5): the engine keeps one a row, and no row meets another's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from ftkernels.sampling import GREEDY, Sampling, row_seed
from torch import Tensor

from ftcli.facts.generation import EngineLayout, bucket_of, pages_of, slots_of
from ftcli.generation.cache import NO_SLOT, Cache, Decode, SlotPool
from ftcli.generation.decoding import Forward, PlacedPrompt, kept_shape
from ftcli.generation.engine import Engine
from ftcli.generation.generator import copied_bytes, merged_model
from ftcli.generation.requests import GenerationRequest
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.layers import FusedDeltaLayer
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from tests.small_models import build
from tests.tiers import further

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
LONGEST = 160
#: Around the filter's width and the chunks' boundaries.
SIZES = (1, 2, 3, 4, 5, 31, 63, 64, 65, 66, 127, 128, 129, 130)


def qwen(**change: Any) -> Any:
    return build("qwen3_5_text", **change).requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> Any:
    found = qwen()
    patch(found, "reference")
    return found


def prompts(sizes: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(5, 250, (size,), generator=generator).tolist()) for size in sizes]


def engine_of(model: Any, rows: int = 4, pages: int | None = None) -> Engine:
    """An engine whose pages and states hold NaN wherever nobody has written, and again when they are given back."""
    layout = EngineLayout(rows, pages or rows * pages_of(LONGEST) + 2, merged=False)
    engine = Engine(Forward(model, PLAN, CPU), layout, LONGEST, PLAN, CPU)
    tools = engine._tools
    pools = [pool for layer in every_state(tools.cache) for pool in layer]
    for pool in (tools.cache.keys, tools.cache.values, *pools):
        pool.fill_(float("nan"))
    give_back = tools.slots.give_back

    def poisoning(slot: int) -> None:
        for pool in pools:
            pool[slot] = float("nan")
        give_back(slot)

    tools.slots.give_back = poisoning  # type: ignore[method-assign]
    return engine


def every_state(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    return [(states.inputs, states.matrices) for states in cache._states]


def all_free(engine: Engine) -> bool:
    tools = engine._tools
    return tools.pool.free == engine.layout.pages - 1 and tools.slots.free == tools.cache.slots


def tokens(engine: Engine, requests: list[GenerationRequest], sampling: Sampling = GREEDY) -> list[list[list[int]]]:
    return [[one.tokens for one in each] for each in engine.complete(requests, sampling)]


def generated(model: Any, asked: list[tuple[int, ...]], limit: int) -> list[list[int]]:
    """transformers' own, in one batch that is padded on the left."""
    width = max(map(len, asked))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in asked])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found: list[list[int]] = out[:, width:].tolist()
    return found


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"linear_num_key_heads": 2, "linear_num_value_heads": 2},
    {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 16},
    {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 3,
    },
    {"head_dim": 32, "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
]


@pytest.mark.parametrize("change", LAYOUTS, ids=["1:2", "1:1", "1:3", "attention first", "wide heads"])
def test_greedy_is_generates(change: dict[str, Any]) -> None:
    """Prompts of all lengths, in two batches of transformers', of which rows enter the engine as others leave it."""
    model, asked = qwen(**change), prompts(SIZES)
    expected = generated(model, asked, 12)
    patch(model, "reference")
    engine = engine_of(model, rows=5)
    assert [each[0] for each in tokens(engine, [GenerationRequest(prompt, 12) for prompt in asked])] == expected
    assert len({token for one in expected for token in one}) > 20
    assert all_free(engine)


def test_what_is_sampled_of_one_prompt_is_what_each_would_alone(model: Any) -> None:
    """The prompt is computed once; each completion goes on from a state of its own. Few pages: they take turns, and
    the prompt's state waits for the last of them.
    """
    calls: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda m, a, out: calls.append(out.shape[1]))
    for size in (64, 70, 2):
        (prompt,), seeds = prompts([size], size), tuple(row_seed(size, at) for at in range(6))
        one_by_one = engine_of(model, rows=1)
        alone = [tokens(one_by_one, [GenerationRequest(prompt, 10, (seed,))], Sampling(1.0))[0][0] for seed in seeds]
        calls.clear()
        engine = engine_of(model, rows=4, pages=pages_of(size) + 2 * pages_of(size + 10) + 2)
        assert tokens(engine, [GenerationRequest(prompt, 10, seeds)], Sampling(1.0))[0] == alone
        assert [count for count in calls if count > 1] == [size]
        assert len({tuple(one) for one in alone}) == 6
        assert all_free(engine)
    hook.remove()


def test_rows_enter_and_leave_and_states_are_used_again(model: Any) -> None:
    """Many prompts of few and several completions and of all limits, over the same few slots, in any order."""
    generator = torch.Generator().manual_seed(3)
    sizes = [SIZES[int(torch.randint(len(SIZES), (1,), generator=generator))] for _ in range(9)]
    requests = [
        GenerationRequest(prompt, 1 + at * 5 % 13, tuple(row_seed(at, each) for each in range(1 + at % 4)))
        for at, prompt in enumerate(prompts(sizes, 5))
    ]
    sampling = Sampling(0.9, top_k=50)
    alone = [tokens(engine_of(model, rows=1), [request], sampling)[0] for request in requests]
    for rows in (2, 5):
        engine = engine_of(model, rows=rows)
        assert tokens(engine, requests, sampling) == alone
        assert all_free(engine)
        if rows == 2:
            assert tokens(engine, requests[::-1], sampling) == alone[::-1]


def test_as_many_states_are_in_use_as_a_layout_has(model: Any) -> None:
    """One a row, and that of a prompt whose completions have not all begun: never more, and sometimes all."""
    for rows in (1, 5):
        engine = engine_of(model, rows=rows)
        slots, fewest = engine._tools.slots, []

        def counted(take: Any = slots.take, slots: SlotPool = slots, fewest: list[int] = fewest) -> int:
            slot: int = take()
            fewest.append(slots.free)
            return slot

        slots.take = counted  # type: ignore[method-assign]
        for several in (1, 3, 9):
            each = tuple(range(several))
            requests = [GenerationRequest(prompt, 1 + at % 3, each) for at, prompt in enumerate(prompts([3] * 7))]
            engine.complete(requests, Sampling(1.0))
            assert all_free(engine)
        assert min(fewest) == 0


def test_slots() -> None:
    pool = SlotPool(2)
    taken = {pool.take(), pool.take()}
    assert taken == {0, 1}
    with pytest.raises(ValueError, match="all of 2 states are in use"):
        pool.take()
    pool.give_back(1)
    assert pool.take() == 1
    pool.give_back(0)
    with pytest.raises(ValueError, match="free already"):
        pool.give_back(0)
    none = SlotPool(0)
    assert [none.take(), none.take()] == [NO_SLOT, NO_SLOT]
    none.give_back(NO_SLOT)


def test_closing_gives_states_back(model: Any) -> None:
    engine = engine_of(model)
    run = engine.run([GenerationRequest(prompt, 50, (1, 2, 3)) for prompt in prompts([5, 70, 3])])
    for _ in range(9):
        next(run)
    assert not all_free(engine)
    run.close()
    assert all_free(engine)


def empty_cache(model: Any, rows: int) -> Cache:
    cache = Cache(kept_shape(model, torch.float32), EngineLayout(rows, 3 * rows + 1, False), torch.float32, CPU)
    for pool in (cache.keys, cache.values, *(pool for layer in every_state(cache) for pool in layer)):
        pool.fill_(float("nan"))
    return cache


def placed(asked: list[tuple[int, ...]]) -> list[PlacedPrompt]:
    """Three pages and a slot each; the slots in another order than the prompts."""
    return [PlacedPrompt(prompt, range(1 + 3 * at, 4 + 3 * at), len(asked) - 1 - at) for at, prompt in enumerate(asked)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("heads", [(2, 4), *further((1, 3))])
def test_logits_after_prefill_and_after_each_step_are_those_of_a_whole_pass(
    heads: tuple[int, int], backend: Any
) -> None:
    """In plain torch and on the kernels, in Triton's interpreter; with an empty row beside the others. The chunks of a
    prompt and steps of one token are two ways to the same state: 2e-5 of the largest logit apart in float32, over 40
    steps.
    """
    sizes = dict(zip(("linear_num_key_heads", "linear_num_value_heads"), heads, strict=True))
    model = qwen(head_dim=16, linear_key_head_dim=32, linear_value_head_dim=16, **sizes)
    texts = prompts([41, 110, 170] if backend == "torch" else [6, 70, 135], 2)
    steps = 40 if backend == "torch" else 5
    with torch.no_grad():
        whole = [model(input_ids=torch.tensor([text])).logits[0] for text in texts]
    patch(model, "reference")
    for layer in decoder_layers(model):
        layer._backend = backend
    forward, cache = Forward(model, PLAN, CPU), empty_cache(model, 3)
    begun = placed([text[:-steps] for text in texts])
    size = bucket_of(len(texts))
    table, slots = torch.zeros((size, 3), dtype=torch.int32), torch.full((size,), NO_SLOT, dtype=torch.int32)
    for at, prompt in enumerate(begun):
        table[at], slots[at] = torch.tensor(list(prompt.pages), dtype=torch.int32), prompt.slot
    with forward.generating():
        found = forward.prefill(begun, cache)
        for row, text, exact in zip(found, texts, whole, strict=True):
            assert (row - exact[len(text) - steps - 1]).abs().max() <= 1e-5 * exact.abs().max()
        for step in range(steps):
            lengths = torch.tensor([len(text) - steps + step + 1 for text in texts] + [0] * (size - 3)).int()
            ids = torch.tensor([text[len(text) - steps + step] for text in texts] + [0] * (size - 3))
            decode = Decode(cache, table, lengths, backend=backend, slots=slots)
            found = forward.decode(ids, (lengths.long() - 1).clamp(min=0), decode)
            for row, text, exact in zip(found, texts, whole, strict=False):
                assert (row - exact[len(text) - steps + step]).abs().max() <= 2e-5 * exact.abs().max(), step


def test_prompts_do_not_see_each_other(model: Any) -> None:
    """What a prompt leaves is to the bit the same beside others: their numbers do not reach its state."""
    asked = prompts([70, 5, 64], 7)
    other = [tuple(250 - token for token in asked[0]), asked[1], tuple(reversed(asked[2]))]
    found = []
    for texts in (asked, other):
        forward, cache = Forward(model, PLAN, CPU), empty_cache(model, 3)
        with forward.generating():
            logits = forward.prefill(placed(texts), cache)[1]
        found.append([logits, *(pool[1].clone() for layer in every_state(cache) for pool in layer)])
        assert not any(bool(pool[3].isfinite().any()) for layer in every_state(cache) for pool in layer)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    assert all(bool(one.isfinite().all()) for one in found[0])


def test_a_call_without_a_place_for_states_is_refused(model: Any) -> None:
    forward, cache = Forward(model, PLAN, CPU), empty_cache(model, 1)
    ones = torch.ones(1, dtype=torch.int32)
    with forward.generating(), pytest.raises(ValueError, match="no place for the states"):
        forward.decode(ones.long(), ones.long(), Decode(cache, ones[None], ones))


def adapted(**settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(qwen(), LoraConfig(**{"target_modules": "all-linear", "r": 4, **settings}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.eval()


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "in_proj_b", "out_proj"], ["in_proj_qkv"]], ids=["all", "some", "one"]
)
def test_adapters_answer_beside_the_weights_and_merged_into_a_copy(targets: Any) -> None:
    """Of what enters a delta net, of what leaves it, and of queries with their gates."""
    model = adapted(target_modules=targets)
    asked = prompts([3, 66, 20])
    expected = generated(model, asked, 12)
    with model.disable_adapter():
        assert generated(model, asked, 12) != expected
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch(model, "reference")
    requests = [GenerationRequest(prompt, 12) for prompt in asked]
    assert [each[0] for each in tokens(engine_of(model), requests)] == expected
    second = merged_model(model, PLAN, "reference")
    assert [each[0] for each in tokens(engine_of(second.model), requests)] == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_enters_a_delta_net_is_copied_at_once() -> None:
    model = adapted(target_modules=["in_proj_a"])
    second, names = merged_model(model, PLAN, "reference"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    first, copy = (decoder_layers(base)[0].linear_attn for base in (base_of(model), second.model))
    weights = [getattr(copy, name).weight for name in names]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    assert copied_bytes(model, PLAN) == 3 * 4 * sum(weight.numel() for weight in weights)
    assert copy.out_proj.weight is first.out_proj.weight
    assert copy.A_log is first.A_log
    assert isinstance(decoder_layers(second.model)[0], FusedDeltaLayer)


def test_states_are_counted(model: Any) -> None:
    shape = kept_shape(model, torch.float32)
    cache = empty_cache(model, 3)
    held = sum(pool.numel() * pool.element_size() for layer in every_state(cache) for pool in layer)
    assert held == slots_of(shape, 3) * shape.state_bytes
    assert cache.keys.shape[0] == 1  # one layer of four attends
