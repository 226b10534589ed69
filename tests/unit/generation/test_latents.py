"""Latent attention on the engine: pages of latents, of which no key and no value is formed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from ftkernels.device import interpreting
from ftkernels.limits import CACHE_PAGE
from ftkernels.sampling import Sampling, row_seed

from ftcli.assets import asset
from ftcli.config.model import QuantizationConfig
from ftcli.facts.generation import EngineLayout, cache_bytes, cache_shape, choose_layout, pages_of
from ftcli.facts.shape import shape_of
from ftcli.generation.cache import Cache, Decode, Prefill
from ftcli.generation.decoding import Forward, PlacedPrompt, kept_shape
from ftcli.generation.generator import merged_model, open_generator
from ftcli.generation.requests import GenerationRequest
from ftcli.model.patch import patch
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.plan.precision import DtypePlan
from tests.small_models import adapted_everywhere, build
from tests.unit.generation.test_engine import engine_of, generated, prompts, tokens

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
CPU = torch.device("cpu")
#: Queries of no latent, in halves, and values that are wider than the unrotated part of keys.
OTHER: dict[str, Any] = {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "v_head_dim": 12}
CHANGES = [{}, OTHER]


def model_of(model_type: str = "youtu", base: str = "none", **change: Any) -> Any:
    """With adapters that change what it computes; on transformers' layers."""
    model: Any = build(model_type, **change).requires_grad_(False)
    if base != "none":
        for name in layers_to_quantize(model):
            module = quantize_linear(model.get_submodule(name), QuantizationConfig(method=base), name)
            model.set_submodule(name, module)
    torch.manual_seed(1)
    model = adapted_everywhere(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("change", CHANGES, ids=["equal", "other"])
@pytest.mark.parametrize(
    ("model_type", "base"),
    [("youtu", "none"), ("youtu", "nf4"), ("glm4_moe_lite", "none"), ("deepseek_v2", "none")],
)
def test_adapters_answer_beside_weights_that_are_absorbed(model_type: str, base: str, change: dict[str, Any]) -> None:
    if model_type == "deepseek_v2":  # whose features turn in pairs, whatever the config says
        change = {name: value for name, value in change.items() if name != "rope_interleave"}
    model = model_of(model_type, base, **change)
    asked = prompts(4)
    expected = [generated(model, prompt, 20) for prompt in asked]
    assert len({token for one in expected for token in one}) > 5
    with model.disable_adapter():
        assert [generated(model, prompt, 20) for prompt in asked] != expected
    patch(model, "reference")
    found = tokens(engine_of(model, rows=3), [GenerationRequest(prompt, 20) for prompt in asked])
    assert [one[0] for one in found] == expected


@pytest.mark.parametrize("change", CHANGES, ids=["equal", "other"])
def test_a_step_on_the_interpreted_kernels_is_plain_torchs(change: dict[str, Any]) -> None:
    """And as if the sequence were computed whole, whose keys and values are formed."""
    if not interpreting():
        pytest.skip("Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)")
    model = model_of(**change)
    patch(model, "reference")
    forward, ids = Forward(model, PLAN, CPU), list(range(5, 5 + CACHE_PAGE + 10))
    found = []
    with forward.generating():
        for backend in ("torch", "triton"):
            cache = Cache(kept_shape(model, torch.float32), EngineLayout(1, 4, False), torch.float32, CPU)
            cache.keys.fill_(float("nan"))
            forward.prefill([PlacedPrompt(ids[:-1], [1, 3])], cache)
            table, lengths = torch.tensor([[1, 3]], dtype=torch.int32), torch.tensor([len(ids)], dtype=torch.int32)
            given = torch.tensor([ids[-1]]), torch.tensor([len(ids) - 1])
            found.append(forward.decode(*given, Decode(cache, table, lengths, backend=backend)))  # type: ignore[arg-type]
        whole = forward.prefill([PlacedPrompt(ids, [1, 3])], cache)
    for logits in found:
        assert float((logits - whole).norm() / whole.norm()) < 1e-5


def test_completions_of_a_prompt_share_its_latents() -> None:
    model = model_of("glm4_moe_lite")
    patch(model, "reference")
    prompt, sampling = tuple(range(5, 75)), Sampling(1.0)
    seeds = tuple(row_seed(3, at) for at in range(4))
    alone = [
        tokens(engine_of(model, rows=1), [GenerationRequest(prompt, 12, (seed,))], sampling)[0][0] for seed in seeds
    ]
    engine = engine_of(model, rows=3)
    assert tokens(engine, [GenerationRequest(prompt, 12, seeds)], sampling)[0] == alone
    assert len({tuple(one) for one in alone}) == 4
    assert engine._tools.pool.free == engine.layout.pages - 1


def test_a_position_is_576_numbers_a_layer_and_what_is_counted_is_allocated() -> None:
    config = json.loads((asset("configs", "zai-org--GLM-4.7-Flash") / "config.json").read_text())
    described = shape_of(config)
    assert described is not None
    shape = cache_shape(described, 2)
    assert shape.page_bytes == 47 * 576 * 2 * CACHE_PAGE
    layout = choose_layout(shape, 64, 1000, room_bytes=None, copy_bytes=None)
    assert layout is not None
    assert layout.pages == 64 * pages_of(1000) + 2
    cache = Cache(shape, layout, torch.bfloat16, torch.device("meta"))
    assert cache.latents(46).shape == (layout.pages, CACHE_PAGE, 576)
    assert cache_bytes(shape, 64, 1000) == int((cache.keys.nbytes + cache.values.nbytes) / 0.9)


def test_transformers_layers_keep_latents_of_their_own() -> None:
    opened = open_generator(model_of(), PLAN, CPU, rows=2, longest=60, pad=0)
    assert opened.reason == "transformers' layers of model_type youtu keep latents in caches of their own"
    prompt = tuple(range(5, 25))
    (found,) = opened.generator.complete([GenerationRequest(prompt, 10)])
    assert found[0].tokens == generated(model_of(), prompt, 10)


def test_prompts_are_kept_where_they_belong() -> None:
    cache = Cache(cache_shape(_small(), 4), EngineLayout(1, 3, False), torch.float32, CPU)
    cache.keys.zero_()
    latents = torch.randn(1, 70, 16)
    places = torch.arange(70)
    prefill = Prefill(cache, torch.tensor([1, 2])[places // CACHE_PAGE], places % CACHE_PAGE)
    assert prefill.attend_latents(1, latents, lambda: latents, width=8, scaling=1.0) is None
    assert torch.equal(cache.latents(1)[1:].flatten(0, 1)[:70], latents[0])
    assert int(cache.keys.count_nonzero()) == 70 * 16


def _small() -> Any:
    return shape_of(build("youtu").config.to_dict())


@pytest.mark.parametrize("model_type", ["youtu", "glm4_moe_lite"])
def test_a_merged_copy_answers_as_adapters_beside_their_weights_do(model_type: str) -> None:
    """In float64, where the weights that share an input are joined in the copy as well."""
    model = model_of(model_type).double()
    patch(model, "reference")
    plan = DtypePlan("float64", "float64", "float64", False, "a test")
    second = merged_model(model, plan, "reference").model
    ids = torch.arange(5, 45)[None]
    with torch.no_grad():
        found, wanted = (each(input_ids=ids, use_cache=False).logits for each in (second, model))
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6
    layer: Any = second.get_decoder().layers[1].self_attn
    (q, kv), lies = (layer.q_a_proj.weight, layer.kv_a_proj_with_mqa.weight), layer.kv_a_proj_with_mqa.weight.data_ptr()
    assert lies == q.data_ptr() + q.nbytes
    assert kv.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
