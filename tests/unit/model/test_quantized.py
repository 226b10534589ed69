"""Quantised layers: their state, how they are loaded, what is refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from ftkernels.nf4 import quantize_nf4
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ftcli.assets import asset
from ftcli.config import ModelConfig, QuantizationConfig
from ftcli.config.origins import Origins
from ftcli.config.tree import Section
from ftcli.errors import FtcliError
from ftcli.facts.model import read_facts
from ftcli.facts.precision import DtypePlan
from ftcli.model import streamed
from ftcli.model.adapted import projection_of, why_not_fused
from ftcli.model.load import load_model
from ftcli.model.patch import patch
from ftcli.model.quantized import (
    DequantizedLinear,
    NF4Linear,
    QuantizedLinear,
    check_weights,
    quantized_layers,
)
from tests.quantised import quantize_linears

NF4 = QuantizationConfig(method="nf4")
SINGLE = QuantizationConfig(method="nf4", double_quant=False)
TINY = asset("models", "tiny-gemma2")
PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="a test")


def load(
    source: str | Path = "bundled:tiny-gemma2", settings: QuantizationConfig = NF4, kept: int = 0, **change: Any
) -> Any:
    """The model as a run loads it."""
    model = ModelConfig(name_or_path=str(source), tokenizer="bytes", **change)
    facts = read_facts(model, offline=True, origins=Origins(Section(None, {})))
    device = torch.device("cpu")
    return load_model(model, facts, PLAN, device=device, seed=1, offline=True, quantization=settings, kept_layers=kept)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def layer_of(settings: QuantizationConfig = NF4) -> tuple[NF4Linear, nn.Linear]:
    """A quantised layer with a bias, and the linear layer that it stands for."""
    model = nn.ModuleDict({"proj": nn.Linear(64, 48)})
    weight = model["proj"].weight.detach()
    quantize_linears(model, settings)
    layer: Any = model["proj"]
    assert isinstance(layer, NF4Linear)
    dense = nn.Linear(64, 48)
    with torch.no_grad():
        dense.weight.copy_(quantize_nf4(weight, double_quant=settings.double_quant).dequantize(torch.float32))
        dense.bias.copy_(layer.bias)
    return layer, dense.requires_grad_(False)


# The layer


@pytest.mark.parametrize("settings", [NF4, SINGLE], ids=["double", "single"])
def test_a_layer_computes_as_its_dequantised_weight(settings: QuantizationConfig) -> None:
    layer, dense = layer_of(settings)
    x, y = (torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    out, wanted = layer(x), dense(y)
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)
    out.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_a_layer_keeps_no_dense_weight_for_backward() -> None:
    layer, _ = layer_of()
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        layer(torch.randn(2, 64, requires_grad=True))
    assert max(sizes, default=0) <= 2 * 64
    assert not hasattr(layer, "dense")
    assert list(layer.parameters()) == [layer.bias]


def test_autocast_decides_the_dtype() -> None:
    layer, dense = layer_of()
    x = torch.randn(4, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, wanted = layer(x), dense(x)
    assert out.dtype == wanted.dtype == torch.bfloat16
    assert torch.equal(out, wanted)


def same_state(one: NF4Linear, other: NF4Linear) -> bool:
    a, b = dict(one.named_buffers()), dict(other.named_buffers())
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.half(),
        lambda layer: layer.double(),
        lambda layer: layer.to("cpu"),
        copy.deepcopy,
        lambda layer: layer._replicate_for_data_parallel(),
        lambda layer: nn.Sequential(layer).to("cpu", torch.float16)[0],
    ],
    ids=["bfloat16", "half", "double", "device", "deepcopy", "replicate", "inside a model"],
)
@pytest.mark.parametrize("settings", [NF4, SINGLE], ids=["double", "single"])
def test_state_survives_move_copy_and_replicate(settings: QuantizationConfig, move: Callable[[Any], Any]) -> None:
    layer, _ = layer_of(settings)
    kept = copy.deepcopy(layer)
    moved = move(layer)
    assert same_state(moved, kept)
    assert torch.equal(moved.frozen_weight().dequantize(torch.float32), kept.frozen_weight().dequantize(torch.float32))


def test_a_state_dict_carries_all_of_it() -> None:
    (layer, _), (other, _) = layer_of(), layer_of()
    assert not same_state(layer, other)
    other.load_state_dict(layer.state_dict())
    assert same_state(layer, other)


def _without(layer: NF4Linear, name: str) -> NF4Linear:
    layer._buffers[name] = None
    return layer


def _bare_replica(layer: NF4Linear) -> NF4Linear:
    replica = layer._replicate_for_data_parallel()
    replica._buffers = {}
    return replica


@pytest.mark.parametrize(
    ("lose", "what"),
    [
        (lambda layer: layer.to("meta"), "meta"),
        (lambda layer: layer.to("meta").to_empty(device="cpu"), "never written"),
        (_bare_replica, "packed, absmax, table, nested_absmax"),
        (lambda layer: _without(layer, "nested_offset"), "nested_offset gone"),
        (lambda layer: _without(layer, "absmax"), "absmax gone"),
        (lambda layer: setattr(layer, "absmax", layer.absmax.float()) or layer, "absmax must be"),
        (lambda layer: setattr(layer, "packed", layer.packed[:-1].clone()) or layer, "data must be 1536"),
    ],
    ids=["meta", "to_empty", "replicate", "offset", "scales", "rounded scales", "cut"],
)
def test_state_lost_by_move_copy_or_replicate_is_refused_at_build(lose: Callable[[Any], Any], what: str) -> None:
    layer, _ = layer_of()
    model = nn.ModuleDict({"proj": lose(layer)})
    for buffer in model.buffers():
        if what == "never written" and buffer.is_floating_point():
            buffer.fill_(7.0)  # whatever lay there
    with pytest.raises(FtcliError) as caught:
        check_weights(model)
    (finding,) = caught.value.findings
    assert finding.code == "FT331"
    assert "proj" in finding.message
    assert "(48, 64)" in finding.message
    assert what in finding.message


def test_a_raw_packed_tensor_is_refused_at_build_with_layer_name_and_shapes(reference: Any) -> None:
    """Elsewhere: "mat1 and mat2 shapes cannot be multiplied (2158x4096 and 1x8388608)"."""
    model = copy.deepcopy(reference)
    linear = model.model.layers[1].mlp.up_proj
    packed = quantize_nf4(linear.weight).data.view(1, -1)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    for kernels in ("off", "auto", "reference"):
        with pytest.raises(FtcliError) as caught:
            patch(model, kernels)  # type: ignore[arg-type]
        (finding,) = caught.value.findings
        assert finding.code == "FT331"
        for part in ("model.layers.1.mlp.up_proj", "uint8", "(1, 65536)", "(512, 256)"):
            assert part in finding.message


def test_merging_into_a_packed_weight_is_refused() -> None:
    model = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(FtcliError) as caught:
        model.merge_and_unload()
    assert caught.value.findings[0].code == "FT332"
    assert "model.layers.0.self_attn.q_proj" in caught.value.findings[0].message
    with pytest.raises(TypeError):
        nn.functional.linear(torch.zeros(1, 256), model.base_model.model.model.layers[0].mlp.up_proj.weight)


def test_kernels_get_the_weight_object() -> None:
    model = peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    layer = model.base_model.model.model.layers[0]
    assert why_not_fused(layer.self_attn.q_proj) is None
    assert why_not_fused(layer.mlp.up_proj) is None
    projection = projection_of(layer.self_attn.q_proj)
    assert projection.rank == 2
    assert torch.equal(projection.weight.dequantize(torch.float32), layer.self_attn.q_proj.base_layer.frozen_weight().dequantize(torch.float32))  # fmt: skip  # noqa: E501
    assert projection_of(layer.mlp.up_proj).rank == 0


def test_layers_on_the_kernels_compute_what_modules_compute() -> None:
    """Loss and gradients of a whole model, the fused layers' plain torch form against transformers' layers."""
    torch.manual_seed(0)
    model = peft.get_peft_model(load(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    ids = torch.randint(0, 256, (2, 24))

    def losses() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, wanted = losses()
    applied = patch(model, "reference")
    assert all(entry.on for entry in applied.table)
    fused, found = losses()
    applied.undo()
    assert fused == pytest.approx(plain, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-4, name
    assert losses()[0] == plain


# Loading


def test_a_loaded_model_is_the_reference_with_quantised_weights(reference: Any) -> None:
    model = load()
    quantised = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert quantised == {n for n, m in reference.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    for name in quantised:
        wanted = quantize_nf4(reference.get_submodule(name).weight)
        assert torch.equal(model.get_submodule(name).packed, wanted.data)
        assert torch.equal(model.get_submodule(name).absmax, wanted.absmax)
    others = {n: p for n, p in reference.named_parameters() if n.removesuffix(".weight") not in quantised}
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in others.items()}
    assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in others.items())
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[n], b) for n, b in reference.named_buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == reference.generation_config.eos_token_id
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_one_full_precision_matrix_is_alive_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to build: when the next layer is quantised, the last one's full weight has been freed."""
    alive: list[weakref.ref[Any]] = []
    most = 0
    plain = streamed.quantize_linear

    def watching(linear: nn.Linear, settings: QuantizationConfig, name: str) -> Any:
        nonlocal most
        alive.append(weakref.ref(linear.weight))
        most = max(most, sum(ref() is not None for ref in alive))
        return plain(linear, settings, name)

    monkeypatch.setattr(streamed, "quantize_linear", watching)
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
    assert [entry["dequantized"] for entry in table].count(True) == 2 * 7
    assert {entry["method"] for entry in table} == {"nf4"}


# bitsandbytes' files


def _packed_state(tensor: torch.Tensor, double_quant: bool) -> dict[str, torch.Tensor]:
    """What bitsandbytes saves for a weight, keyed by what follows the layer's name."""
    weight = quantize_nf4(tensor, double_quant=double_quant)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    parts = {".weight": weight.data.view(-1, 1), ".weight.absmax": weight.absmax, ".weight.quant_map": weight.table}
    if weight.nested is not None:
        n = weight.nested
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(n.offset)}
        parts |= {".weight.nested_absmax": n.absmax, ".weight.nested_quant_map": n.table.clone()}
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts


@pytest.fixture
def stored(tmp_path: Path) -> Callable[..., Path]:
    """``stored(double_quant, change)``: a folder in bitsandbytes' layout; ``change`` edits its tensors."""

    def _stored(double_quant: bool = True, change: Callable[[dict[str, Any]], Any] = lambda tensors: None) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(TINY / "model.safetensors").items():
            layer = name.removesuffix(".weight")
            if layer.endswith("_proj"):
                tensors |= {layer + key: part for key, part in _packed_state(tensor.float(), double_quant).items()}
            else:
                tensors[name] = tensor
        change(tensors)
        for file in TINY.iterdir():
            if file.suffix == ".json":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((TINY / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": double_quant,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return _stored


@pytest.mark.parametrize("double_quant", [True, False])
def test_a_checkpoint_in_bitsandbytes_layout_is_read_without_bitsandbytes(
    double_quant: bool, stored: Callable[..., Path]
) -> None:
    loaded, own = load(stored(double_quant)), load(settings=NF4 if double_quant else SINGLE)
    ids = torch.randint(0, 256, (1, 9))
    assert torch.equal(loaded(ids).logits, own(ids).logits)
    for name, module in own.named_modules():
        if isinstance(module, NF4Linear):
            assert same_state(loaded.get_submodule(name), module)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("double_quant", [True, False])
def test_what_bitsandbytes_itself_saves_is_read(double_quant: bool) -> None:
    from bitsandbytes import functional

    weight = torch.randn(48, 64) * 0.02
    data, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double_quant)
    parts = {"weight": data, **state.as_dict(packed=True)}
    read = streamed.nf4_from_bitsandbytes(parts, weight.shape)
    assert torch.equal(read.dequantize(torch.float32), functional.dequantize_4bit(data, state))


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.__setitem__(f"model.layers.0.mlp.up_proj.{key}", value)


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.pop(f"model.layers.0.mlp.up_proj.{key}")


def _fp4(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__"
    tensors[name + "fp4"] = tensors.pop(name + "nf4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("weight.absmax"), "without its absmax"),
        (_drop("weight.quant_state.bitsandbytes__nf4"), "without its quant_state"),
        (_drop("weight.nested_absmax"), "what turns them back is missing"),
        (_drop("weight"), "without its weight"),
        (_fp4, "stored as fp4"),
        (_set("weight.quant_map", torch.zeros(16)), "quant_map is not NF4's"),
        (_set("weight.absmax", torch.zeros(3, dtype=torch.uint8)), "absmax must be 2048"),
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight not stored"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}), "no place for .* model.extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), r"shape \(2,\) and must be \(256,\)"),
    ],
    ids=["scales", "state", "nested scales", "data", "fp4", "table", "size", "missing", "unexpected", "shape"],
)
def test_a_file_that_does_not_fit_is_refused_with_the_layer(
    change: Callable[[dict[str, Any]], Any], message: str, stored: Callable[..., Path]
) -> None:
    with pytest.raises(FtcliError, match=message) as caught:
        load(stored(change=change))
    assert caught.value.findings[0].code == "FT323"
    if "model." not in message and "shape" not in message:
        assert "model.layers.0.mlp.up_proj" in caught.value.findings[0].message


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
