"""Adapters on experts, and without them: what is counted is what is trained, saved, and loaded by plain PEFT."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ftcli.config.model import LoraConfig
from ftcli.config.recipe import Recipe
from ftcli.errors import FtcliError
from ftcli.facts.adapters import adapters
from ftcli.facts.shape import shape_of
from ftcli.model.lora import apply_lora, load_adapter
from ftcli.model.lora_targets import planned_adapters
from ftcli.model.patch import patch
from ftcli.model.quantized import layers_to_quantize
from ftcli.model.trained_weights import save_weights
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import adapters_of, left_out, trained_parameters
from tests.small_models import VOCABULARY, build, build_sparse
from tests.tiers import in_turn
from tests.unit.model.test_quantized_stacks import SPARSE, random_b

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
IDS = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))


def trained_of(model: Any) -> dict[str, int]:
    return {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("experts", [True, False])
@pytest.mark.parametrize("model_type", SPARSE)
def test_what_is_counted_is_what_is_trained(model_type: str, experts: bool) -> None:
    lora = LoraConfig(r=3, experts=experts)
    base = build_sparse(model_type)
    shape = shape_of(base.config.to_dict())
    assert shape is not None
    planned = planned_adapters(base, lora)
    recipe = Recipe.model_validate({"version": 1, "model": {"name_or_path": "x"}, "lora": lora.model_dump()})
    model, targets = apply_lora(base, lora, PLAN, seed=0)
    trained = trained_of(model)
    assert planned.parameters == sum(trained.values())
    assert trained_parameters(recipe, shape).elements == sum(trained.values())
    assert sum(each.elements for each in adapters(shape, lora)) == sum(trained.values())
    assert any(".experts." in name for name in trained) is experts
    assert bool(targets.experts) is experts
    assert any("self_attn" in name for name in trained)
    shared = any(".shared_expert." in name for name, _ in base.named_parameters())
    assert any(".shared_expert." in name for name in trained) is shared
    of_experts = {n: c for n, c in trained.items() if ".experts." in n}
    assert sum(of_experts.values()) == sum(
        3 * stack.experts * (stack.in_features + stack.out_features)
        for layer in shape.layers
        for stack in layer.stacks
        if experts
    )
    assert planned.layers.get("gate_up_proj", 0) == (sum(bool(x.stacks) for x in shape.layers) if experts else 0)


@pytest.mark.parametrize("model_type", SPARSE)
def test_what_a_quantized_base_leaves_out_is_counted(model_type: str) -> None:
    """Dense layers whose names PEFT takes for those of experts, where there are such."""
    lora, base = LoraConfig(r=3), build(model_type)
    shape = shape_of(base.config.to_dict())
    assert shape is not None
    planned = planned_adapters(base, lora, layers_to_quantize(base))
    values = {"version": 1, "model": {"name_or_path": "x"}, "lora": lora.model_dump()}
    recipe = Recipe.model_validate({**values, "quantization": {"method": "nf4"}})
    assert trained_parameters(recipe, shape).elements == planned.parameters
    assert left_out(recipe, shape) == planned.left
    layers = Counter[str]()
    for each in adapters_of(recipe, shape):
        layers[each.linear.leaf] += each.layers
    assert layers == planned.layers
    beside_dense = ("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "ernie4_5_moe")
    assert bool(planned.left) == (model_type in beside_dense)


@pytest.mark.parametrize(("model_type", "experts"), in_turn(SPARSE, [True, False]))
def test_plain_peft_loads_what_our_layers_trained(model_type: str, experts: bool, tmp_path: Path) -> None:
    base = build_sparse(model_type)
    base.save_pretrained(tmp_path / "base")
    model, _ = apply_lora(base, LoraConfig(r=3, alpha=6, experts=experts), PLAN, seed=0)
    random_b(model)
    applied = patch(model, "reference")
    assert all(entry.on for entry in applied.table)
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
    save_weights(model, tmp_path / "adapter")

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(".experts." in name for name in config.get("target_parameters") or ()) is experts
    assert any(".experts." in name for name in saved) is experts
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        bare = plain(input_ids=IDS, use_cache=False).logits
        adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        assert (adapted(input_ids=IDS, use_cache=False).logits - wanted).norm() < 1e-5 * wanted.norm()
        assert (bare - wanted).norm() > 1e-2 * wanted.norm()
        again = load_adapter(build_sparse(model_type), tmp_path / "adapter").eval()
        patch(again, "reference")
        assert (again(input_ids=IDS, use_cache=False).logits - wanted).norm() < 1e-5 * wanted.norm()
        merged = adapted.merge_and_unload()
        assert (merged(input_ids=IDS, use_cache=False).logits - wanted).norm() < 1e-5 * wanted.norm()


def test_a_list_of_targets_says_itself_whether_experts_are_meant() -> None:
    for names, meant in ((["q_proj"], False), (["q_proj", "gate_up_proj"], True)):
        for experts in (True, False):
            model, _ = apply_lora(
                build("qwen3_moe"), LoraConfig(r=3, target_modules=names, experts=experts), PLAN, seed=0
            )
            assert any(".experts." in name for name in trained_of(model)) is meant


def test_without_experts_the_others_take_every_setting() -> None:
    base = build("mixtral")
    with pytest.raises(FtcliError) as caught:
        apply_lora(build("mixtral"), LoraConfig(r=3, dropout=0.1), PLAN, seed=0)
    [finding] = caught.value.findings
    assert finding.code == "FT333"
    assert "lora.experts: false" in (finding.help or "")
    model, _ = apply_lora(base, LoraConfig(r=3, dropout=0.1, experts=False), PLAN, seed=0)
    assert trained_of(model)
