"""A second model with merged weights: it answers as the first one, which is only read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from ftcli.generation.generator import copied_bytes, merged_model
from ftcli.model.backbone import base_of, decoder_layers
from ftcli.model.fused import FusedDecoderLayer
from ftcli.model.patch import patch
from ftcli.plan.precision import DtypePlan
from tests.small_models import build

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
IDS = torch.randint(5, 250, (1, 24), generator=torch.Generator().manual_seed(1))


def adapted(model_type: str, **settings: Any) -> Any:
    settings = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, **settings}
    model = get_peft_model(build(model_type).requires_grad_(False), LoraConfig(**settings))
    shaken(model, 0)
    return model.eval()


def shaken(model: Any, seed: int) -> None:
    """Adapters that say something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def said(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = base_of(model)(input_ids=IDS, use_cache=False).logits
    return logits


def base_bits(model: Any) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in base_of(model).state_dict().items() if "lora_" not in name
    }


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gemma4_text", {}),
        ("gemma4_unified_text", {}),
        ("qwen2", {"target_modules": ["q_proj", "v_proj"]}),
        ("phi3", {}),
        ("llama", {"use_dora": True}),
        ("qwen3", {"use_rslora": True}),
        ("gemma3", {"target_modules": r".*language_model.*(q|k|v|o|gate|up|down)_proj"}),
    ],
)
def test_it_answers_as_the_first_over_many_steps_and_the_base_stays_to_the_bit(
    model_type: str, settings: dict[str, Any], kernels: Any
) -> None:
    model = adapted(model_type, **settings)
    patch(model, kernels)
    before, config = base_bits(model), base_of(model).config.to_dict()
    second = merged_model(model, PLAN, kernels)
    for step in range(20):
        shaken(model, step)
        second.refresh()
        expected = said(model)
        assert torch.allclose(said(second.model), expected, atol=2e-4 * float(expected.abs().max()))
    after = base_bits(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert before.keys() == after.keys()
    assert base_of(model).config.to_dict() == config


def test_it_is_put_on_the_kernels_where_the_first_is_not() -> None:
    model = adapted("llama")
    second = merged_model(model, PLAN, "reference")
    assert all(isinstance(layer, FusedDecoderLayer) for layer in decoder_layers(second.model))
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in decoder_layers(base_of(model)))
    expected = said(model)
    assert torch.allclose(said(second.model), expected, atol=2e-4 * float(expected.abs().max()))


def test_switched_off_adapters_are_left_out() -> None:
    model = adapted("llama")
    with model.disable_adapter():
        expected = said(model)
        second = merged_model(model, PLAN, "off")
    assert torch.equal(said(second.model), expected)


def test_what_is_not_adapted_is_shared() -> None:
    model = adapted("llama", target_modules=["q_proj"])
    second = merged_model(model, PLAN, "off")
    layer, first = decoder_layers(second.model)[0], decoder_layers(base_of(model))[0]
    assert layer.mlp.down_proj.weight is first.mlp.down_proj.weight
    assert layer.self_attn.k_proj is not first.self_attn.k_proj  # beside q, in one product with it
    group = [linear.weight for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)]
    assert len({weight.untyped_storage().data_ptr() for weight in group}) == 1
    assert copied_bytes(model, PLAN) == 4 * 2 * sum(weight.numel() for weight in group)


def test_where_nothing_differs_nothing_is_copied() -> None:
    assert copied_bytes(build("llama"), PLAN) is None
    half = DtypePlan("float32", None, "bfloat16", True, "a test")
    assert copied_bytes(build("llama"), half) is not None
