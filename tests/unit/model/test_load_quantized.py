"""Models that are quantized while they are loaded or drawn."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from ftkernels.nf4 import quantize_nf4
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.config.model import QuantizationConfig
from ftcli.errors import FtcliError
from ftcli.model import load_quantized as loading
from ftcli.model.nf4 import NF4Linear
from ftcli.model.patch import patch, why_not_fused
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear, check_weights, quantized_layers
from tests import small_models
from tests.quantized import TINY, load


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def test_a_loaded_model_is_the_reference_with_quantized_weights(reference: Any) -> None:
    model = load()
    quantized = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert quantized == {n for n, m in reference.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    for name in quantized:
        wanted = quantize_nf4(reference.get_submodule(name).weight)
        assert torch.equal(model.get_submodule(name).packed, wanted.data)
        assert torch.equal(model.get_submodule(name).absmax, wanted.absmax)
    others = {n: p for n, p in reference.named_parameters() if n.removesuffix(".weight") not in quantized}
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in others.items()}
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in others.items())
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[n], b) for n, b in reference.named_buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == reference.generation_config.eos_token_id
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_one_full_precision_matrix_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to build: when the next layer is quantized, the last one's full weight has been freed."""
    alive: list[weakref.ref[Any]] = []
    most = 0
    plain = loading.quantize_linear

    def watching(linear: nn.Linear, settings: QuantizationConfig, name: str, *, trained: bool = False) -> Any:
        nonlocal most
        alive.append(weakref.ref(linear.weight))
        most = max(most, sum(ref() is not None for ref in alive))
        return plain(linear, settings, name, trained=trained)

    monkeypatch.setattr(loading, "quantize_linear", watching)
    for change in ({}, {"init": "random"}):
        alive.clear()
        load(**change)
        assert len(alive) == 28
        assert most <= 2


def test_random_weights_have_the_models_spread(reference: Any) -> None:
    model, again = load(init="random"), load(init="random")
    std = reference.config.initializer_range
    for name, module in model.named_modules():
        if isinstance(module, NF4Linear):
            weight = module.frozen_weight().dequantize(torch.float32)
            assert float(weight.std()) == pytest.approx(std, rel=0.1), name
            assert torch.equal(weight, again.get_submodule(name).frozen_weight().dequantize(torch.float32))
    assert not model.model.norm.weight.any()  # Gemma's norms multiply by 1 + weight
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(dict(model.named_buffers())["model.rotary_emb.inv_freq"], reference.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    "model_type", small_models.by_kind([*small_models.TEXT, *small_models.MULTIMODAL], small_models.STRUCTURES)
)
def test_every_parameter_is_drawn(model_type: str) -> None:
    """A mixture may draw its router's weights, which were not there yet: Qwen3.5's were whatever the memory held."""
    holding = loading.ModelStorage(QuantizationConfig(method="nf4"), torch.float32, torch.device("cpu"))
    config = small_models.config_of(model_type)
    if model_type in ("gpt2", "apertus"):
        with pytest.raises(FtcliError, match="FT336"):
            loading.random_quantized(config, holding, "eager", 0)
        return
    model = loading.random_quantized(config, holding, "eager", 0)
    for name, parameter in model.named_parameters():
        assert not parameter.is_floating_point() or parameter.isfinite().all(), name


def test_what_transformers_does_not_draw_is_refused() -> None:
    holding = loading.ModelStorage(QuantizationConfig(method="nf4"), torch.float32, torch.device("cpu"))
    with pytest.raises(FtcliError, match=r"FT336.*no random start for model\.layers\.0\.mlp\.act_fn\.alpha_p"):
        loading.random_quantized(small_models.config_of("apertus"), holding, "eager", 0)


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_kept_layers_hold_the_same_numbers_in_full(init: Any) -> None:
    packed, kept = load(init=init), load(init=init, kept=2)
    for name, module in packed.named_modules():
        if isinstance(module, NF4Linear):
            other = kept.get_submodule(name)
            assert type(other) is (DequantizedLinear if int(name.split(".")[2]) < 2 else NF4Linear)
            if isinstance(other, DequantizedLinear):
                assert torch.equal(other.weight, module.frozen_weight().dequantize(torch.float32))
                assert why_not_fused(other) is None
    ids = torch.randint(0, 256, (1, 9))
    assert torch.equal(kept(ids).logits, packed(ids).logits)
    check_weights(kept)
    applied = patch(kept, "reference")
    assert all(entry.on for entry in applied.table)
    assert torch.allclose(kept(ids).logits, packed(ids).logits, rtol=1e-4, atol=1e-4)
    table = quantized_layers(kept)
    assert [entry.dequantized for entry in table].count(True) == 2 * 7
    assert {entry.method for entry in table} == {"nf4"}


def test_what_is_not_finite_is_refused_with_the_layer(tmp_path: Path) -> None:
    tensors = load_file(TINY / "model.safetensors")
    tensors["model.layers.2.self_attn.o_proj.weight"][3, 3] = float("nan")
    for file in TINY.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FtcliError, match=r"model.layers.2.self_attn.o_proj \(256, 256\).*NaN"):
        load(tmp_path)


def test_shards_and_files_of_the_bare_backbone_are_read(tmp_path: Path) -> None:
    """An index with several files, and names without the ``model.`` that the causal model puts in front."""
    with safe_open(TINY / "model.safetensors", framework="pt") as file:
        tensors = {key.removeprefix("model."): file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    keys = sorted(tensors)
    parts = {"a.safetensors": keys[::2], "b.safetensors": keys[1::2]}
    for name, own in parts.items():
        save_file({key: tensors[key] for key in own}, tmp_path / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, own in parts.items() for key in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    ids = torch.randint(0, 256, (1, 5))
    assert torch.equal(load(tmp_path)(ids).logits, load()(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "gemma2"
