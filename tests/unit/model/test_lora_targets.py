"""What `lora.target_modules` and `lora.modules_to_save` mean, the same in every family."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ftcli.config.model import LoraConfig, QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.facts.shape import shape_of
from ftcli.model.lora import apply_lora
from ftcli.model.lora_targets import planned_adapters, summary_of_targets
from ftcli.model.quantized import layers_to_quantize, quantize_linear
from ftcli.model.trained_weights import save_weights
from ftcli.plan.precision import DtypePlan
from ftcli.plan.trained import trained_parameters
from tests.small_models import MULTIMODAL, STRUCTURES, TEXT, VOCABULARY, build, by_kind, config_of
from tests.unit.conftest import Load

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")

#: PEFT 0.21 takes the names of dense layers in these families for those of their experts.
UNNAMEABLE = {"qwen3_next", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "ernie4_5_moe"}


def lora(**values: Any) -> LoraConfig:
    return LoraConfig.model_validate({"r": 4, **values})


def adapted_names(model: Any) -> set[str]:
    names = {re.sub(r"\.lora_[AB]\..*", "", name) for name, _ in model.named_parameters() if ".lora_" in name}
    return {name.removeprefix("base_model.model.") for name in names}


@pytest.mark.parametrize("model_type", by_kind([*TEXT, *MULTIMODAL], STRUCTURES))
def test_all_linear_is_every_linear_layer_of_the_decoder_and_nothing_else(model_type: str) -> None:
    model = build(model_type)
    tower = ("vision", "visual", "audio", "multi_modal", "embed_vision")
    wanted = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and not any(part in name for part in tower)
        and re.search(r"\.\d+\.", name)
        and not name.endswith(("router", "shared_expert_gate"))
    }
    if model_type in ("mamba", "mamba2", "falcon_h1", "jamba", "nemotron_h"):
        wanted = {n for n in wanted if not re.search(r"(mixer|mamba)\.(out_proj|dt_proj)$", n)}
    stacks = {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.rpartition(".")[0].endswith(".experts")
    }
    model, targets = apply_lora(model, lora(), PLAN, seed=0)
    assert {n.replace(".experts.base_layer", ".experts") for n in adapted_names(model)} == wanted | stacks
    assert bool(targets.weights) == (model_type in UNNAMEABLE)
    assert not targets.left

    ids = torch.randint(5, VOCABULARY - 8, (1, 12))
    model(input_ids=ids).logits.pow(2).mean().backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert f"{trained:,} parameters trained" in summary_of_targets(model, targets)


def test_what_peft_cannot_adapt_is_said() -> None:
    """It adapts weights as parameters, and quantized ones are none."""
    base = build("deepseek_v3")
    settings = QuantizationConfig.model_validate({"method": "nf4"})
    for name in layers_to_quantize(base):
        base.set_submodule(name, quantize_linear(base.get_submodule(name), settings, name))
    model, targets = apply_lora(base, lora(), PLAN, seed=0)
    assert "not adapted: 1 mlp.gate_proj, 1 mlp.up_proj" in summary_of_targets(model, targets)
    plain = build("deepseek_v3")
    assert planned_adapters(plain, lora(), layers_to_quantize(plain)).left == planned_adapters(base, lora()).left


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma3", "opt"])
@pytest.mark.parametrize(
    ("names", "code", "said"),
    [
        (["q_prj"], "FT311", "did you mean q_proj?"),
        (["q_proj", "fc9"], "FT311", "is named fc9"),
        (["lm_head"], "FT312", "adapters on lm_head"),
        (["embed_tokens"], "FT312", "adapters on embed_tokens"),
    ],
)
def test_a_target_that_matches_nothing_is_an_error(model_type: str, names: list[str], code: str, said: str) -> None:
    with pytest.raises(FtcliError) as caught:
        apply_lora(build(model_type), lora(target_modules=names), PLAN, seed=0)
    [finding] = caught.value.findings
    assert finding.code == code
    assert said in f"{finding.message} {finding.help}"


def test_a_name_in_a_vision_tower_is_not_meant() -> None:
    model, _ = apply_lora(build("gemma3"), lora(target_modules=["q_proj"], modules_to_save=["norm"]), PLAN, seed=0)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".language_model." in name for name in trained)
    with pytest.raises(FtcliError, match="is named fc1"):  # a layer of the tower
        apply_lora(build("gemma3"), lora(target_modules=["fc1"]), PLAN, seed=0)


@pytest.mark.parametrize(("name", "code"), [("nrm", "FT313"), ("lm_head", "FT314"), ("embed_tokens", "FT314")])
def test_saved_modules_that_are_not_there_or_half_of_a_pair(name: str, code: str) -> None:
    with pytest.raises(FtcliError) as caught:
        apply_lora(build("gemma2"), lora(modules_to_save=[name]), PLAN, seed=0)
    assert caught.value.findings[0].code == code


def test_dropout_on_experts_is_refused_and_said_as_what_it_is() -> None:
    with pytest.raises(FtcliError) as caught:
        apply_lora(build("mixtral"), lora(dropout=0.1), PLAN, seed=0)
    assert caught.value.findings[0].code == "FT333"
    with pytest.raises(FtcliError, match="FT333"):  # `ftcli check`, before the weights are loaded
        planned_adapters(build("mixtral"), lora(dropout=0.1))
    apply_lora(build("mixtral"), lora(dropout=0.1, target_modules=["q_proj"]), PLAN, seed=0)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # PEFT's own patterns
def test_the_names_of_experts_in_transformers_4_are_understood() -> None:
    model, targets = apply_lora(build("mixtral"), lora(target_modules=["q_proj", "w1", "w2", "w3"]), PLAN, seed=0)
    assert set(targets.by_peft) == {"w1", "w2", "w3"}
    assert any(".experts." in name for name in adapted_names(model))


def test_the_adapters_file_names_its_targets_in_order(tmp_path: Path) -> None:
    model, _ = apply_lora(build("llama"), lora(), PLAN, seed=0)
    save_weights(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3"])
@pytest.mark.parametrize("extra", ["", ", modules_to_save: [norm]"])
def test_the_arithmetic_of_what_is_trained_is_the_models(model_type: str, extra: str, load: Load) -> None:
    recipe = load(f"lora: {{r: 4{extra}}}\n").recipe
    assert recipe.lora is not None
    model, _ = apply_lora(build(model_type), recipe.lora, PLAN, seed=0)
    shape = shape_of(config_of(model_type).to_dict())
    assert shape is not None
    assert trained_parameters(recipe, shape).elements == sum(p.numel() for p in model.parameters() if p.requires_grad)
