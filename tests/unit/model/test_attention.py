"""The choice of an attention backend, and the mask object that reaches it through transformers."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from ftkernels.limits import Gpu
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import (
    AttentionMaskInterface,
    create_bidirectional_mask,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
)

from ftcli.facts.generation import CacheShape, EngineLayout
from ftcli.generation.cache import Cache, Decode, Prefill
from ftcli.model.attention import NAME, ftcli_attention_forward, register
from ftcli.model.masks import CallMask, mask_for
from ftcli.plan.attention import AttentionCall, choose_attention
from tests.small_models import build

CUDA = torch.device("cuda")
HOPPER = Gpu((9, 0), 227 * 1024)
AMPERE = Gpu((8, 0), 163 * 1024)
TURING = Gpu((7, 5), 64 * 1024)
CPU = Gpu(None, 0)


@pytest.mark.parametrize(("machine", "call", "backend", "reason"), [
    (HOPPER, {}, "cudnn", "dense causal"),
    (AMPERE, {}, "flash", "dense causal"),
    (TURING, {"dtype": "float16"}, "sdpa", "7.5"),
    (CPU, {"dtype": "float32"}, "sdpa", "CPU"),
    (HOPPER, {"dtype": "float32"}, "sdpa", "float32"),
    (HOPPER, {"windowed": True}, "triton", "window"),
    (HOPPER, {"mask": "intervals"}, "triton", "padding"),
    (AMPERE, {"mask": "intervals", "windowed": True}, "triton", "padding"),
    (TURING, {"mask": "intervals", "dtype": "float16"}, "sdpa", "capability 7.5"),
    (CPU, {"mask": "intervals", "dtype": "float32"}, "sdpa", "CUDA"),
    (HOPPER, {"mask": "any"}, "sdpa", "not made of intervals"),
    (HOPPER, {"mask": "any", "decoding": True}, "sdpa", "intervals"),
    (HOPPER, {"softcap": 50.0, "head_dim": 256}, "triton", "capped"),
    (HOPPER, {"softcap": 50.0, "head_dim": 256, "dtype": "float32"}, "triton", "capped"),
    (HOPPER, {"softcap": 50.0, "head_dim": 256, "mask": "intervals", "windowed": True}, "triton", "capped"),
    (HOPPER, {"softcap": 50.0, "head_dim": 528}, "eager", "not 528"),
    (HOPPER, {"head_dim": 512}, "triton", "wider than dense backends take"),
    (HOPPER, {"head_dim": 512, "dropout": True}, "sdpa", "dropout"),
    (HOPPER, {"softcap": 50.0, "mask": "any"}, "eager", "not made of intervals"),
    (HOPPER, {"softcap": 50.0, "decoding": True}, "eager", "one query"),
    (HOPPER, {"softcap": 50.0, "dropout": True}, "eager", "dropout"),
    (HOPPER, {"dropout": True}, "sdpa", "dropout"),
    (TURING, {"softcap": 50.0, "dtype": "float16"}, "eager", "capability 7.5"),
    (CPU, {"softcap": 50.0, "dtype": "float32"}, "eager", "CUDA"),
    (HOPPER, {"sinks": True, "head_dim": 64}, "triton", "there are sinks"),
    (HOPPER, {"sinks": True, "softcap": 50.0, "windowed": True}, "triton", "capped"),
    (HOPPER, {"sinks": True, "decoding": True}, "eager", "one query"),
    (TURING, {"sinks": True, "dtype": "float16"}, "eager", "there are sinks, which SDPA cannot do, and"),
    (CPU, {"sinks": True, "dtype": "float32", "mask": "intervals"}, "eager", "CUDA"),
])  # fmt: skip
def test_the_backend_is_a_pure_function_of_machine_and_call(
    machine: Gpu, call: dict[str, Any], backend: str, reason: str
) -> None:
    chosen = choose_attention(machine, AttentionCall(**{"dtype": "bfloat16", "head_dim": 128, **call}))
    assert chosen.backend == backend
    assert reason in chosen.reason


def config(**changes: Any) -> Any:
    """A Gemma-2 config on our attention, with a window of 5."""
    register()
    made = transformers.Gemma2Config(sliding_window=5, **changes)
    made._attn_implementation = NAME
    return made


def made_by(create: Any, batch: int, length: int, **arguments: Any) -> CallMask:
    """What transformers hands to layers."""
    values = {"attention_mask": None, "past_key_values": None, **arguments}
    mask = create(config=config(), inputs_embeds=torch.zeros(batch, length, 4), **values)
    assert isinstance(mask, CallMask)
    return mask


def padded(side: str, lengths: tuple[int, ...] = (11, 4, 9)) -> Tensor:
    """(rows, longest) with 1 for tokens."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return (mask.flip(1) if side == "left" else mask).long()


PACKED = torch.tensor(
    [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [0, 0, 1, 0, 1, 2, 3, 4, 5, 6, 7]]
)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all ones": {"attention_mask": torch.ones(3, 11, dtype=torch.long)},
    "left": {"attention_mask": padded("left")},
    "right": {"attention_mask": padded("right")},
    "packed": {"position_ids": PACKED},
    "one document": {"position_ids": torch.arange(11)[None]},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
def test_intervals_say_what_transformers_dense_mask_says(create: Any, case: str) -> None:
    mask = made_by(create, 3, 11, **CASES[case])
    assert mask.window == (5 if create is create_sliding_window_causal_mask else None)
    assert mask.kind == ("plain" if case in ("plain", "all ones", "one document") else "intervals")
    tokens = CASES[case].get("attention_mask", torch.ones(3, 11)).bool()[:, None, :, None]
    wanted = mask.dense.expand(3, 1, 11, 11) & tokens  # transformers lets padding see what stands before it
    assert torch.equal(mask.ranges.dense().expand_as(wanted), wanted)


@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_cached_prefix_longer_than_the_window(create: Any, queries: int) -> None:
    """A sliding cache drops keys: the mask is of those that are left, padding with them."""
    cache = DynamicCache(config=config(num_hidden_layers=2))
    states = torch.zeros(3, 1, 11, 2)
    for layer in range(2):
        cache.update(states, states, layer)
    attention_mask = torch.cat([padded("left"), torch.ones(3, queries, dtype=torch.long)], dim=1)
    mask = made_by(create, 3, queries, attention_mask=attention_mask, past_key_values=cache)
    assert mask.k_len == (11 + queries if create is create_causal_mask else 4 + queries)
    assert mask.kind == "intervals"
    assert torch.equal(mask.ranges.dense().expand_as(mask.dense), mask.dense)


def test_the_object_is_made_of_nothing_until_a_layer_asks() -> None:
    mask = made_by(create_causal_mask, 3, 11, attention_mask=padded("left"))
    assert not {"ranges", "dense", "_mask"} & set(vars(mask))
    first = mask.ranges
    assert mask.ranges is first
    assert "dense" not in vars(mask)


def holes() -> Tensor:
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 4] = 0
    return mask


@pytest.mark.parametrize(("create", "arguments"), [
    (create_causal_mask, {"attention_mask": holes()}),
    (create_causal_mask, {"and_mask_function": lambda b, h, q, k: (k % 2 == 0) | (q == k)}),
    (create_bidirectional_mask, {}),
    (create_causal_mask, {"block_sequence_ids": torch.tensor([[-1] * 3 + [0] * 3 + [-1] * 5] * 3)}),
])  # fmt: skip
def test_what_is_not_made_of_intervals_stays_dense(create: Any, arguments: dict[str, Any]) -> None:
    if "block_sequence_ids" in arguments and "block_sequence_ids" not in create.__code__.co_varnames:
        pytest.skip("this transformers has no blocks in causal masks")
    mask = made_by(create, 3, 11, **arguments)
    assert mask.kind == "any"
    assert mask.dense.shape[-2:] == (11, 11)
    with pytest.raises(ValueError, match="not one interval"):
        _ = mask.ranges


def test_a_chunk_is_not_taken_for_a_window() -> None:
    made = config()
    made.attention_chunk_size = 4
    mask = create_chunked_causal_mask(
        config=made, inputs_embeds=torch.zeros(1, 11, 4), attention_mask=None, past_key_values=None
    )
    assert mask.kind == "any"
    assert not mask.dense[0, 0, 4, 3]


def qkv(batch: int = 3, length: int = 11, keys: int = 11) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, heads, size, 16) for heads, size in ((4, length), (2, keys), (2, keys))]


SINKS = torch.tensor([-2.0, 0.5, 3.0, 6.0])


@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (5.0, None), (None, SINKS), (5.0, SINKS)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
def test_kernels_and_dense_backends_agree(create: Any, case: str, softcap: float | None, sinks: Tensor | None) -> None:
    mask = made_by(create, 3, 11, **CASES[case])
    options: dict[str, Any] = {"scaling": 0.25, "softcap": softcap, "sliding_window": mask.window, "s_aux": sinks}
    dense, _ = ftcli_attention_forward(torch.nn.Identity(), *qkv(), mask, **options)
    ours, _ = ftcli_attention_forward(torch.nn.Identity(), *qkv(), mask, kernels="triton", **options)
    tokens = CASES[case].get("attention_mask", torch.ones(3, 11)).bool()
    torch.testing.assert_close(ours[tokens], dense[tokens], rtol=1e-5, atol=1e-6)
    if create is create_causal_mask:
        # A caller's own dense mask, boolean or added to the scores, says the same.
        given = mask.dense.expand(3, 1, 11, 11)
        added = torch.zeros(3, 1, 11, 11).masked_fill(~given, torch.finfo(torch.float32).min)
        for tensor in (given, added, added.expand(3, 4, 11, 11)):
            out, _ = ftcli_attention_forward(torch.nn.Identity(), *qkv(), tensor, **options)
            torch.testing.assert_close(out[tokens], dense[tokens], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 5])
def test_without_a_mask_the_queries_are_the_last_of_the_keys(window: int | None) -> None:
    q, k, v = qkv()
    whole, _ = ftcli_attention_forward(
        torch.nn.Identity(), q, k, v, None, scaling=0.25, sliding_window=window, softcap=5.0
    )
    for queries in (1, 4):
        for kernels in ("auto", "triton"):
            out, _ = ftcli_attention_forward(
                torch.nn.Identity(), q[:, :, -queries:], k, v, None, scaling=0.25, sliding_window=window, softcap=5.0,
                kernels=kernels,
            )  # fmt: skip
            torch.testing.assert_close(out, whole[:, -queries:], rtol=1e-5, atol=1e-6)


def test_dropout_leaves_the_kernels() -> None:
    torch.manual_seed(0)
    mask = made_by(create_causal_mask, 3, 11)
    for softcap in (None, 5.0):
        options: dict[str, Any] = {"scaling": 0.25, "softcap": softcap, "kernels": "triton"}
        kept, _ = ftcli_attention_forward(torch.nn.Identity(), *qkv(), mask, **options)
        dropped, _ = ftcli_attention_forward(torch.nn.Identity(), *qkv(), mask, dropout=0.5, **options)
        assert not torch.allclose(kept, dropped)


def test_a_mask_of_another_layer_type_or_length_is_refused() -> None:
    windowed = made_by(create_sliding_window_causal_mask, 3, 11)
    with pytest.raises(ValueError, match="window 5 reached a layer with window None"):
        ftcli_attention_forward(torch.nn.Identity(), *qkv(), windowed, scaling=0.25)
    full = made_by(create_causal_mask, 3, 11)
    with pytest.raises(ValueError, match="window None reached a layer with window 5"):
        ftcli_attention_forward(torch.nn.Identity(), *qkv(), full, scaling=0.25, sliding_window=5)
    with pytest.raises(ValueError, match="11 queries and 11 keys reached a layer with 9 and 9"):
        ftcli_attention_forward(torch.nn.Identity(), *qkv(length=9, keys=9), full, scaling=0.25)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_gpt_osss_layers_give_the_same_on_ours(kernels: Any) -> None:
    """Output and every gradient, the sinks' among them, of a whole model with a window on every other layer."""
    torch.manual_seed(0)
    model: Any = build("gpt_oss", head_dim=16)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.sinks, -2.0, 3.0)
    ids = torch.randint(5, 250, (2, 40))
    names = [name for name, _ in model.named_parameters()]

    def run() -> dict[str, Tensor]:
        states = model.model(input_ids=ids).last_hidden_state
        grads = torch.autograd.grad(states.square().sum(), list(model.parameters()), allow_unused=True)
        return {"": states.detach(), **{n: g for n, g in zip(names, grads, strict=True) if g is not None}}

    model.set_attn_implementation("eager")
    wanted = run()
    assert sum(name.endswith("sinks") for name in wanted) == len(model.model.layers)
    register()
    interpreted = "ftcli_interpreted_sinks"
    AttentionInterface.register(interpreted, partial(ftcli_attention_forward, kernels=kernels))
    AttentionMaskInterface.register(interpreted, mask_for)
    model.set_attn_implementation(interpreted)
    found = run()
    assert found.keys() == wanted.keys()
    for name, truth in wanted.items():
        error = (found[name] - truth).norm() / truth.norm().clamp_min(1e-12)
        assert error <= 2e-5, (name, float(error))


class Keeps:
    """A cache that answers with the sinks that it was called with."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor | None, **_: Any) -> Any:
        return sinks


def test_a_cache_gets_the_sinks() -> None:
    module: Any = SimpleNamespace(layer_idx=0)
    out, _ = ftcli_attention_forward(module, *qkv(), None, scaling=0.25, s_aux=SINKS, cached=Keeps())
    assert out is SINKS


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_one_token_against_pages_is_the_last_of_all(sinks: Tensor | None) -> None:
    """The engine's cache: what it attends to is what a whole call attends to, in prefill and decoding."""
    q, k, v = qkv(batch=1)
    options: dict[str, Any] = {"scaling": 0.25, "s_aux": sinks, "sliding_window": 5}
    wanted, _ = ftcli_attention_forward(torch.nn.Identity(), q, k, v, None, **options)
    cache = Cache(CacheShape(1, 2, 16, 4), EngineLayout(1, 2, False), torch.float32, torch.device("cpu"))
    module: Any = SimpleNamespace(layer_idx=0)
    prefill = Prefill(cache, torch.ones(10, dtype=torch.long), torch.arange(10))
    first, _ = ftcli_attention_forward(
        module, q[:, :, :10], k[:, :, :10], v[:, :, :10], None, cached=prefill, **options
    )
    table, length = torch.ones(1, 1, dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
    for backend in ("torch", "triton"):
        step = Decode(cache, table, length, backend=backend)  # type: ignore[arg-type]
        last, _ = ftcli_attention_forward(
            module, q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], None, cached=step, **options
        )
        torch.testing.assert_close(torch.cat([first, last], dim=1), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("softcap", "sinks"), [(5.0, None), (None, SINKS), (5.0, SINKS)])
def test_scores_in_blocks_of_queries_are_those_of_all(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None, sinks: Tensor | None
) -> None:
    """Where no kernel runs, a long sequence holds the scores of some queries at a time, also in backward."""
    module = import_module("ftcli.model.attention")
    torch.manual_seed(0)
    leaves = [torch.randn(2, heads, 21, 16, requires_grad=True) for heads in (4, 2, 2)]
    own = [] if sinks is None else [sinks.clone().requires_grad_()]
    sizes: list[int] = []
    block = module._eager_block

    def watched(query: Tensor, *others: Any) -> Tensor:
        sizes.append(query.shape[2])
        result: Tensor = block(query, *others)
        return result

    def run() -> list[Tensor]:
        out, _ = ftcli_attention_forward(
            torch.nn.Module(), *leaves, None, scaling=0.25, softcap=softcap, sliding_window=6, s_aux=(own or [None])[0]
        )
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *own])]

    whole = run()
    monkeypatch.setattr(module, "_eager_block", watched)
    monkeypatch.setattr(module, "_SCORE_BYTES", 2 * 4 * 21 * 4 * 8)
    for found, wanted in zip(run(), whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert sorted(sizes) == [5, 5, 8, 8, 8, 8]
