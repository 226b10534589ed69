"""Multimodal checkpoints: the language model is found in their config.json, and the other parts are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.model import LoraConfig, ModelConfig
from ftcli.config.recipe import Recipe
from ftcli.config.yaml import MapNode, Origins
from ftcli.errors import Origin
from ftcli.facts.model import ModelFacts, read_facts
from ftcli.facts.shape import shape_of
from ftcli.model.load import config_of
from ftcli.model.pretrained import hollow
from ftcli.plan.trained import trained_parameters
from tests.small_models import MULTIMODAL
from tests.small_models import config_of as small_config

QWEN_FLAT: dict[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
#: In the form in which they are released: values that are left out, and Qwen's flat ones; and billions of parameters.
RELEASED: dict[str, tuple[float, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        4.30,
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "Mistral3ForConditionalGeneration": (
        24.01,
        {
            "model_type": "mistral3",
            "tie_word_embeddings": False,
            "vision_feature_layer": -1,
            "text_config": {
                "model_type": "mistral",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "num_hidden_layers": 40,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 131072,
                "max_position_embeddings": 131072,
                "sliding_window": None,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "num_attention_heads": 16,
                "image_size": 1540,
                "patch_size": 14,
            },
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        8.29,
        {
            **QWEN_FLAT,
            "model_type": "qwen2_vl",
            "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584},
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        8.29,
        {
            **QWEN_FLAT,
            "model_type": "qwen2_5_vl",
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
            },
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        8.77,
        {
            "model_type": "qwen3_vl",
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "qwen3_vl_text",
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "vocab_size": 151936,
            },
            "vision_config": {
                "model_type": "qwen3_vl",
                "depth": 27,
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_heads": 16,
                "out_hidden_size": 4096,
                "deepstack_visual_indexes": [8, 16, 24],
            },
        },
    ),
}


def facts(raw: dict[str, Any], folder: Path) -> ModelFacts:
    (folder / "config.json").write_text(json.dumps(raw))
    model = ModelConfig.model_validate({"name_or_path": str(folder), "tokenizer": "bytes"})
    return read_facts(model, offline=True, origins=Origins(MapNode(Origin("a test"), {})))


@pytest.mark.parametrize("architecture", RELEASED)
def test_released_configs_have_a_language_model_and_a_count(architecture: str, tmp_path: Path) -> None:
    """Issue 11, B4: Qwen2-VL and Qwen2.5-VL, whose config.json is flat, were refused as no language models."""
    billions, values = RELEASED[architecture]
    found = facts({**values, "architectures": [architecture]}, tmp_path)
    assert found.senses == "vision"
    assert found.shape is not None
    assert found.parameters == sum(p.numel() for p in hollow(config_of(found.raw)).parameters())
    assert found.parameters / 1e9 == pytest.approx(billions, abs=0.02)
    assert found.max_positions is not None or architecture == "Qwen3VLForConditionalGeneration"


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_parts_that_are_not_trained_are_counted_apart(model_type: str) -> None:
    config = small_config(model_type)
    shape = shape_of(config.to_dict())
    if shape is None:
        assert model_type in ("gemma4", "muse_glimmer", "qwen3_vl_moe", "qwen3_5_moe")
        return
    model = hollow(config)
    total, language = (
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.get_decoder().parameters()),
    )
    head = 0 if shape.tied else model.get_output_embeddings().weight.numel()
    assert shape.parameters == total
    assert shape.other_parameters == total - language - head
    assert trained_parameters(
        Recipe.model_validate({"version": 1, "model": {"name_or_path": "x"}}), shape
    ).elements == (language + head)


def test_adapters_are_those_of_the_language_model() -> None:
    shape = shape_of(RELEASED["Gemma3ForConditionalGeneration"][1])
    assert shape is not None
    recipe = Recipe.model_validate(
        {"version": 1, "model": {"name_or_path": "x"}, "lora": LoraConfig(r=16).model_dump()}
    )
    assert trained_parameters(recipe, shape).elements == 34 * 16 * sum(
        x.in_features + x.out_features for x in shape.linears
    )
