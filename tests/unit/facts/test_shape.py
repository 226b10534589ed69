"""The description of a model by layer, held against the models that transformers builds from the same config."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ftcli.facts.shape import ModelShape, shape_of
from ftcli.tables.families import TABLE
from tests.small_models import TEXT

COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ONE_KEY = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32, "head_dim": 16}
#: What released configs of a family say otherwise than transformers' defaults do.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, {"use_sliding_window": True}],
    "qwen3": [{"attention_bias": True, "head_dim": 24, "use_sliding_window": True, "sliding_window": 8}],
    "gemma3_text": [{"sliding_window_pattern": 3}, {"tie_word_embeddings": False}],
    "smollm3": [{"no_rope_layers": [1, 0, 1, 1, 0, 1, 1, 1, 0]}, {"no_rope_layer_interval": 2, "attention_bias": True}],
    "olmo3": [{"layer_types": ["full_attention", "sliding_attention"] * 4 + ["full_attention"]}],
    "exaone4": [{"sliding_window": None, "layer_types": ["full_attention"] * 9}, {"sliding_window_pattern": 3}],
    "cohere2": [{"sliding_window_pattern": 2}, {"attention_bias": True}],
    "glm4": [{"attention_bias": False, "partial_rotary_factor": 0.25}],
    "starcoder2": [{"use_bias": False, "sliding_window": 8}],
    "stablelm": [{"use_parallel_residual": True, "use_qkv_bias": True, "partial_rotary_factor": 0.5}],
    "seed_oss": [{"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "ernie4_5": [{"use_bias": True}],
    "phi3": [{"partial_rotary_factor": 0.5, "sliding_window": 8}],
    "granite": [{"attention_bias": True, "mlp_bias": True}],
    "qwen3_moe": [
        {"mlp_only_layers": [0, 4], "num_experts": 12, "attention_bias": True, "head_dim": 24},
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8},
    ],
    "qwen2_moe": [{"decoder_sparse_step": 3, "qkv_bias": False}],
    "glm4_moe": [
        {"first_k_dense_replace": 3, "n_shared_experts": 2, "attention_bias": True, "head_dim": 24},
        {"use_qk_norm": True},
    ],
    "ernie4_5_moe": [
        {"moe_layer_start_index": 2, "moe_layer_end_index": 6, "moe_layer_interval": 2},
        {"moe_num_shared_experts": 0, "tie_word_embeddings": False},
    ],
    "deepseek_v2": [{"first_k_dense_replace": 1, "q_lora_rank": None, "n_routed_experts": 16, "mlp_bias": True}],
    "glm4_moe_lite": [
        {"q_lora_rank": None, "attention_bias": True, "qk_nope_head_dim": 24, "v_head_dim": 32},
        {"mlp_layer_types": ["sparse", "dense", "sparse"] * 3, "n_shared_experts": 2, "attention_bias": True},
    ],
    "deepseek_v3": [{"first_k_dense_replace": 1, "q_lora_rank": None, "n_routed_experts": 16}],
    "youtu": [{"tie_word_embeddings": False, "v_head_dim": 192}],
    "mixtral": [{"num_local_experts": 6, "sliding_window": 8}],
    "olmoe": [{"norm_topk_prob": True, "attention_bias": True}],
    "mellum": [
        {
            "mlp_layer_types": ["dense", "sparse", "sparse"] * 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 3,
        }
    ],
    "gemma4_text": [
        {
            "layer_types": ["sliding_attention", "full_attention"] * 4 + ["full_attention"],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 100,
        },
        {**_ONE_KEY, "hidden_size_per_layer_input": 0},
        {
            **_ONE_KEY,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
        {"per_layer_config": {at: {"head_dim": 32, "num_key_value_heads": 1} for at in ("05", "08")}},
    ],
    "gemma4_unified_text": [{**_ONE_KEY, "attention_bias": True}],
    "qwen3_5_text": [
        {"layer_types": ["full_attention"] + ["linear_attention"] * 8, "attention_bias": True},
        {"full_attention_interval": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
        {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "head_dim": 24},
    ],
}
#: transformers builds no model without.
NEEDED: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 6},
}
ALONE = [
    name for name in TABLE if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]  # the others are parts: tests/unit/facts/test_towers.py
CASES = [(name, NEEDED.get(name, {}) | values) for name in ALONE for values in ({}, *VARIANTS.get(name, []))]


def described(model_type: str, values: dict[str, Any]) -> tuple[ModelShape, Any]:
    """The shape of a config.json, and the model that transformers builds of it, without memory."""
    stated = {**COMMON, **values}
    shape = shape_of({"model_type": model_type, **stated})
    assert shape is not None
    with torch.device("meta"):
        return shape, AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **stated))


@pytest.mark.parametrize(("model_type", "values"), CASES)
def test_parameters_and_linears_are_those_of_the_model(model_type: str, values: dict[str, Any]) -> None:
    shape, model = described(model_type, values)
    assert shape.parameters == model.num_parameters()
    assert shape.num_layers == len(model.get_decoder().layers)
    for layer, module in zip(shape.layers, model.get_decoder().layers, strict=True):
        built = {
            name: (linear.in_features, linear.out_features, linear.bias is not None)
            for name, linear in module.named_modules()
            if isinstance(linear, nn.Linear)
        }
        experts = TABLE[model_type].experts
        if experts is not None:  # those that are trained by none
            built = {name: x for name, x in built.items() if not name.endswith(("shared_expert_gate", "router.proj"))}
        described_linears = {x.name: (x.in_features, x.out_features, x.bias) for x in layer.linears if x.experts == 1}
        assert described_linears == built
        stacks = {name: tuple(p.shape) for name, p in module.named_parameters() if p.dim() == 3 and "experts." in name}
        turned = experts is not None and experts.transposed
        stated = {x.name: (x.experts, x.out_features, x.in_features) for x in layer.stacks}
        assert {name: (e, i, o) if turned else (e, o, i) for name, (e, o, i) in stated.items()} == stacks
        biases = {n: p.shape for n, p in module.named_parameters() if n.endswith("_bias") and ".experts." in n}
        assert {f"{x.name}_bias": (x.experts, x.out_features) for x in layer.stacks if x.bias} == biases
        if layer.stacks:
            router = module.get_submodule(experts.path(experts.router))
            used = router.top_k if hasattr(router, "top_k") else getattr(router.config, experts.used)
            assert layer.stacks[0].used == used


@pytest.mark.parametrize(("model_type", "values"), CASES)
def test_windows_are_those_of_the_model(model_type: str, values: dict[str, Any]) -> None:
    shape, model = described(model_type, values)
    for layer, module in zip(shape.layers, model.get_decoder().layers, strict=True):
        if layer.attention is None:
            assert not hasattr(module, "self_attn")
            continue
        attention = module.self_attn
        if model_type == "exaone4":
            built = attention.sliding_window if attention.is_sliding else None
        elif hasattr(attention, "sliding_window"):
            built = attention.sliding_window
        elif model_type == "qwen2_moe":
            built = None
        else:
            built = getattr(attention.config, "sliding_window", None)
        assert layer.attention.window == built


@pytest.mark.parametrize(("model_type", "values"), CASES)
def test_rotation_is_that_of_the_model(model_type: str, values: dict[str, Any]) -> None:
    """Told by what attention is asked: queries at two positions differ where, and as far as, they are rotated."""
    shape, model = described(model_type, values)
    rotary, hidden = model.get_decoder().rotary_emb, torch.zeros(1, 2, 64, device="meta")
    by_type = "layer_type" in inspect.signature(rotary.forward).parameters
    positions = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    kinds = sorted(set(rotary.config.layer_types)) if by_type else [None]
    given = [rotary(hidden, positions, *([kind] if kind else [])) for kind in kinds]
    rotated = [each.rotary_dim for each in shape.attending]
    each = 2 if TABLE[model_type].single_angles else 1
    angles = [turned if isinstance(turned, torch.Tensor) else turned[0] for turned in given]  # complex, or cosines
    assert set(rotated) <= {0, *(angle.shape[-1] * each for angle in angles)}
    attentions = [x.self_attn for x in model.get_decoder().layers if hasattr(x, "self_attn")]
    if hasattr(attentions[0], "use_rope"):
        assert [bool(each) for each in rotated] == [bool(each.use_rope) for each in attentions]


@pytest.mark.parametrize(("model_type", "values"), [case for case in CASES if TABLE[case[0]].delta_nets is not None])
def test_delta_nets_are_those_of_the_model(model_type: str, values: dict[str, Any]) -> None:
    shape, model = described(model_type, values)
    for layer, module in zip(shape.layers, model.get_decoder().layers, strict=True):
        if layer.delta_net is None:
            assert not hasattr(module, "linear_attn")
            continue
        net = module.linear_attn
        assert layer.delta_net.channels == net.conv_dim
        assert layer.delta_net.width == net.value_dim
        assert layer.delta_net.filter_width == net.conv_kernel_size
        heads = layer.delta_net.key_heads, layer.delta_net.value_heads
        assert heads == (net.num_k_heads, net.num_v_heads)
        assert (layer.delta_net.key_dim, layer.delta_net.value_dim) == (net.head_k_dim, net.head_v_dim)


def test_every_described_type_has_a_small_model() -> None:
    """Which the tests of training, generation and exports run."""
    assert set(ALONE) - {"bitnet"} <= set(TEXT)


def test_a_config_that_is_not_described_is_told_apart() -> None:
    stated = {"model_type": "stablelm", **COMMON}
    assert shape_of(stated) is not None
    assert shape_of({**stated, "qk_layernorm": True}) is None
    assert shape_of({**stated, "model_type": "qwen3_next"}) is None
    assert shape_of({**stated, "model_type": "mixtral", "router_jitter_noise": 0.1}) is None


@pytest.mark.parametrize("types", [[], ["full_attention"]])
def test_fewer_kinds_of_layers_than_layers_are_refused(types: list[str]) -> None:
    """As transformers refuses them: the model would be described with fewer layers than it has."""
    with pytest.raises(ValueError, match="num_hidden_layers is 9"):
        shape_of({"model_type": "gemma2", **COMMON, "layer_types": types})
