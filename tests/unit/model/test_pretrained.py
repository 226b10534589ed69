"""A model comes from its files whole, or is refused with the names of what is wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.fp8 import quantize_rows
from ftkernels.nf4 import quantize_nf4
from safetensors.torch import load_file, save_file

from ftcli.config.model import LoraConfig, ModelConfig, QuantizationConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.errors import FtcliError, Origin
from ftcli.facts.model import read_facts
from ftcli.model.experts import QuantizedStack
from ftcli.model.load import config_of, load_model
from ftcli.model.lora import apply_lora, load_adapter
from ftcli.model.pretrained import hollow
from ftcli.model.trained_weights import save_weights
from ftcli.plan.precision import DtypePlan
from tests.small_models import MULTIMODAL, STRUCTURES, TEXT, VOCABULARY, build, by_kind
from tests.unit.export.conftest import tokenizer

PLAN = DtypePlan("float32", "float32", "float32", False, "a test")
Tensors = dict[str, torch.Tensor]


def write(folder: Path, model_type: str) -> Path:
    return saved(folder, build(model_type))


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[Tensors], object], pattern: str = "*.safetensors") -> None:
    [path] = folder.glob(pattern)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def load(folder: Path, init: str = "pretrained", **options: Any) -> Any:
    config = ModelConfig.model_validate({"name_or_path": str(folder), "init": init})
    facts = read_facts(config, offline=True, origins=Origins(MapNode(Origin("a test"), {})))
    return load_model(config, facts, PLAN, device=torch.device("cpu"), seed=0, offline=True, **options)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(FtcliError) as caught:
        load(folder, **options)
    [finding] = caught.value.findings
    assert finding.code in ("FT323", "FT305")
    assert caught.value.exit_code == 3
    return f"{finding.code} {finding.message}"


@pytest.mark.parametrize("model_type", by_kind([*TEXT, *MULTIMODAL], STRUCTURES))
def test_every_family_is_loaded_as_it_was_saved(model_type: str, tmp_path: Path) -> None:
    """Whole, without memory, and quantized. Of the last, Falcon-H1's multipliers and a vision tower's positions, which
    are computed and not stored, were unwritten memory.
    """
    wanted = build(model_type)
    found = load(saved(tmp_path, wanted))
    assert type(found) is type(wanted)
    ids = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids).logits, wanted(input_ids=ids).logits)

    # What `check`, random weights and the export of an adapter build from.
    outline = hollow(config_of(json.loads((tmp_path / "config.json").read_text())))
    assert type(outline) is type(wanted)
    shapes = {name: tensor.shape for name, tensor in outline.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in wanted.state_dict().items()}

    if model_type == "gpt2":
        return  # FT336
    quantized = load(tmp_path, quantization=QuantizationConfig.model_validate({"method": "nf4"}))
    buffers, parameters = dict(quantized.named_buffers()), dict(quantized.named_parameters())
    for name, value in found.named_buffers():
        assert torch.equal(buffers[name], value), name
    for name, value in found.named_parameters():
        if isinstance(parameters.get(name), QuantizedStack):
            assert torch.equal(parameters[name] + 0, in_nf4(value)), name
        else:
            assert name not in parameters or torch.equal(parameters[name], value), name


def in_nf4(stack: torch.Tensor) -> torch.Tensor:
    """The numbers that a stack of experts stands for."""
    rows = stack.detach().reshape(-1, stack.shape[-1])
    return quantize_nf4(rows).dequantize(stack.dtype).view(stack.shape)


def in_fp8(stack: torch.Tensor) -> torch.Tensor:
    """The same in fp8."""
    rows = quantize_rows(stack.detach().reshape(-1, stack.shape[-1]))
    return rows.dequantize(stack.dtype).view(stack.shape)


def _rename_all(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"renamed.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is not stored"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is not stored"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is not stored"),
        (_rename_all, "lm_head.weight is not stored"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(47, 32)}),
            "model.layers.0.mlp.up_proj.weight is stored with shape (47, 32) and must be (48, 32)",
        ),
        (lambda t: t.update({"v_head.weight": torch.zeros(1)}), "no place for the stored tensor v_head.weight"),
    ],
)
def test_tensors_that_are_missing_left_over_or_misshaped(
    change: Callable[[Tensors], object], said: str, tmp_path: Path
) -> None:
    """Issue 12, item 13: they were replaced by random numbers, with exit 0."""
    edit(write(tmp_path, "llama"), change)
    assert said in refusal(tmp_path)


def test_what_is_refused_is_not_said_to_be_well_before(tmp_path: Path) -> None:
    """transformers' table of what does not fit ends in advice to train on."""
    edit(write(tmp_path, "llama"), lambda t: t.pop("model.norm.weight"))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    library = logging.getLogger("transformers")
    library.addHandler(handler)
    try:
        refusal(tmp_path)
        assert told == []
        logging.getLogger("transformers.modeling_utils").warning("as before")
        assert told == ["as before"]
    finally:
        library.removeHandler(handler)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is not stored"),
        ({"num_hidden_layers": 1}, "no place for the stored tensor model.layers.1."),
        ({"hidden_act": "no_such"}, "FT305"),
        ({"rope_parameters": {"rope_type": "no_such", "rope_theta": 1e4}}, "FT305"),
        ({"head_dim": 6}, "is stored with shape"),
    ],
)
def test_a_config_that_is_another_models(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    edit_config(write(tmp_path, "llama"), **values)
    assert said in refusal(tmp_path)


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    edit(write(tmp_path, "mixtral"), lambda t: t.pop(next(n for n in sorted(t) if ".experts.2.w1" in n)))
    assert "experts" in refusal(tmp_path)


def test_what_old_versions_stored_and_new_ones_compute_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gemma3"])
def test_an_adapter_without_some_of_its_tensors(model_type: str, tmp_path: Path) -> None:
    """Issue 19, item 1: `eval --run` scored it."""
    model, _ = apply_lora(build(model_type), LoraConfig(r=4), PLAN, seed=0)
    save_weights(model, tmp_path)
    load_adapter(build(model_type), tmp_path)

    def halve(tensors: Tensors) -> None:
        for name in sorted(tensors)[::2]:
            tensors.pop(name)

    edit(tmp_path, halve)
    with pytest.raises(FtcliError) as caught:
        load_adapter(build(model_type), tmp_path)
    [finding] = caught.value.findings
    assert finding.code == "FT334"
    assert "it lacks base_model.model." in finding.message


@pytest.mark.parametrize("damage", ["missing", "cut", "misshaped", "config", "other model"])
def test_an_adapter_that_is_damaged(damage: str, tmp_path: Path) -> None:
    model, _ = apply_lora(build("llama"), LoraConfig(r=4), PLAN, seed=0)
    save_weights(model, tmp_path)
    weights, base = tmp_path / "adapter_model.safetensors", "llama"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "misshaped":
        edit(tmp_path, lambda t: t.update({sorted(t)[0]: torch.zeros(3, 3)}))
    elif damage == "config":
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "x"}')
    else:
        base = "gpt2"
    with pytest.raises(FtcliError) as caught:
        load_adapter(build(base), tmp_path)
    assert caught.value.findings[0].code == "FT334"


@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_quantized_load_lacks_nothing_either(method: str, tmp_path: Path) -> None:
    edit(write(tmp_path, "llama"), lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    said = refusal(tmp_path, quantization=QuantizationConfig.model_validate({"method": method}))
    assert "model.layers.1.mlp.up_proj.weight" in said


@pytest.mark.parametrize("method", ["nf4", "fp8"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_a_model_without_linear_layers_is_not_called_quantized(method: str, init: str, tmp_path: Path) -> None:
    settings = QuantizationConfig.model_validate({"method": method})
    with pytest.raises(FtcliError) as caught:
        load(write(tmp_path, "gpt2"), quantization=settings, init=init)
    assert caught.value.findings[0].code == "FT336"


RENAMED = ("mixtral", "qwen3_moe", "gpt_neox", "deepseek_v3", "jamba", "gemma3", "qwen2_5_vl")


@pytest.mark.parametrize("model_type", RENAMED)
@pytest.mark.parametrize("method", ["nf4", "fp8"])
def test_a_quantized_load_renames_as_transformers_does(model_type: str, method: str, tmp_path: Path) -> None:
    """Issue 11, B5: Mixtral and GPT-NeoX were refused; what is quantized must be what a full load quantizes."""
    from ftcli.model.quantized import QuantizedLinear, layers_to_quantize, quantize_linear

    settings = QuantizationConfig.model_validate({"method": method})
    wanted = build(model_type)
    found = load(saved(tmp_path, wanted), quantization=settings)
    for name in layers_to_quantize(wanted):
        wanted.set_submodule(name, quantize_linear(wanted.get_submodule(name), settings, name))
    assert any(isinstance(module, QuantizedLinear) for module in found.modules())
    packed = [name for name, stack in found.named_parameters() if isinstance(stack, QuantizedStack)]
    assert bool(packed) is (model_type in ("mixtral", "qwen3_moe", "deepseek_v3"))
    for name in packed:
        stack = wanted.get_parameter(name)
        stack.data = in_nf4(stack) if method == "nf4" else in_fp8(stack)
    ids = torch.randint(5, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids).logits, wanted(input_ids=ids).logits)


def quantized_of(model_type: str) -> set[str]:
    """Names of the quantized layers, below the list of decoder layers where they lie in one."""
    from ftcli.model.quantized import layers_to_quantize

    return {name.rpartition("layers.")[2] for name in layers_to_quantize(build(model_type))}


def test_only_the_language_model_is_quantized_and_no_router() -> None:
    """Issue 11: vision towers and plain linear routers were quantized."""
    from ftcli.model.quantized import layers_to_quantize

    for model_type in MULTIMODAL:
        (kind,) = {"vision" in name or "visual" in name for name in layers_to_quantize(build(model_type))}
        assert kind is False, model_type
    assert not [name for name in quantized_of("qwen2_moe") if "shared_expert_gate" in name]
    assert "0.mlp.shared_expert.up_proj" in quantized_of("qwen2_moe")
    assert not [name for name in quantized_of("mamba2") if "out_proj" in name]


@pytest.mark.parametrize("quantization", [None, QuantizationConfig(method="nf4")], ids=["whole", "nf4"])
def test_scores_of_a_random_gemma4_have_a_deviation_of_one(quantization: Any, tmp_path: Path) -> None:
    """Its attention has no scale, and transformers draws the norm of queries as 1. Files are read as they are."""
    folder = write(tmp_path / "files", "gemma4_text")
    drawn = load(folder, init="random", num_layers=3, quantization=quantization)
    assert drawn.config.num_kv_shared_layers == 0
    for layer, width in zip(drawn.model.layers, (8, 8, 16), strict=True):
        assert torch.equal(layer.self_attn.q_norm.weight, torch.full((width,), width**-0.5))
        assert float(layer.layer_scalar) == 1.0
    stored = load_file(folder / "model.safetensors")
    read = load(folder, quantization=quantization)
    for name in ("model.layers.2.self_attn.q_norm.weight", "model.layers.2.layer_scalar"):
        assert torch.equal(read.state_dict()[name], stored[name])
    assert float(read.model.layers[2].layer_scalar) == 0.75
