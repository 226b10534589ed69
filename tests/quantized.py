"""What tests of quantized layers share: models and single layers, quantized and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from ftkernels.nf4 import quantize_nf4
from torch import nn

from ftcli.assets import asset
from ftcli.config.model import ModelConfig, QuantizationConfig
from ftcli.config.yaml import MapNode, Origins
from ftcli.facts.model import read_facts
from ftcli.model.load import load_model
from ftcli.model.nf4 import NF4Linear
from ftcli.model.quantized import can_be_packed, quantize_linear
from ftcli.plan.precision import DtypePlan

NF4 = QuantizationConfig(method="nf4")
SINGLE = QuantizationConfig(method="nf4", double_quant=False)
TINY = asset("models", "tiny-gemma2")
PLAN = DtypePlan("float32", "float32", "float32", autocast=False, reason="a test")


def load(
    source: str | Path = "bundled:tiny-gemma2", settings: QuantizationConfig = NF4, kept: int = 0, **change: Any
) -> Any:
    """The model as a run loads it."""
    model = ModelConfig(name_or_path=str(source), tokenizer="bytes", **change)
    facts = read_facts(model, offline=True, origins=Origins(MapNode(None, {})))
    device = torch.device("cpu")
    return load_model(
        model, facts, PLAN, device=device, seed=1, offline=True, quantization=settings, dequantized_layers=kept
    )


def quantize_linears(model: nn.Module, settings: QuantizationConfig) -> int:
    """Puts a quantized layer in the place of each linear layer but the head; returns how many.

    ftcli itself quantizes while it loads (``ftcli.model.load_quantized``).
    """
    names = [name for name, module in model.named_modules() if can_be_packed(name, module)]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, quantize_linear(linear, settings, name))
    return len(names)


def layer_of(settings: QuantizationConfig = NF4) -> tuple[NF4Linear, nn.Linear]:
    """A quantized layer with a bias, and the linear layer that it stands for."""
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


def same_state(one: NF4Linear, other: NF4Linear) -> bool:
    a, b = dict(one.named_buffers()), dict(other.named_buffers())
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def packed_state(tensor: torch.Tensor, double_quant: bool) -> dict[str, torch.Tensor]:
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
