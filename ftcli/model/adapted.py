"""PEFT's LoRA layers as plain data for the kernels: whether one can be fused, and what it holds right now."""

from __future__ import annotations

from typing import Any, NamedTuple

from ftkernels.projection import FrozenWeight, Packed, Projection
from torch import Tensor, nn

from ftcli.facts.execution import DORA
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear


class LayerPacks(NamedTuple):
    """The adapters of a layer's groups, packed already; None where they are packed in each call."""

    qkv: Packed | None = None
    o: Packed | None = None
    gate_up: Packed | None = None
    down: Packed | None = None


#: Each group packs its own.
UNPACKED = LayerPacks()


def why_not_fused(layer: nn.Module) -> str | None:
    """Why the fused LoRA kernels cannot serve this linear layer; None when they can."""
    from peft.tuners.lora import Linear as LoraLinear

    base = layer
    if isinstance(layer, LoraLinear):
        base = layer.base_layer
        if any(layer.use_dora.values()):
            return DORA
        if any(getattr(layer, "lora_bias", {}).values()):
            return "the adapter has a bias"
        if getattr(layer, "fan_in_fan_out", False):
            return "the weight is stored transposed"
        if len(layer.active_adapters) > 1:
            return "several adapters are active at once"
    if type(base) is not nn.Linear and not isinstance(base, QuantizedLinear | DequantizedLinear):
        return f"its base is a {type(base).__name__}, not a plain linear layer"
    if isinstance(base, QuantizedLinear) and base.rounds_input:
        return f"its {base.method} products round activations to int8, which the fused layers do not"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "its base weight is trained (full fine-tuning)"
    return None


def projection_of(layer: Any, packed: Packed | None = None) -> Projection:
    """The layer's weight, bias and active adapter; without the adapter while it is disabled or merged.

    ``packed``: its group's adapters as they are now, where they are packed already.
    """
    base = getattr(layer, "base_layer", layer)
    weight = _frozen(base)
    if base is layer or layer.disable_adapters or layer.merged or not layer.active_adapters:
        return Projection(weight, base.bias)
    name = layer.active_adapters[0]
    if name not in layer.lora_A:
        return Projection(weight, base.bias)
    dropout = layer.lora_dropout[name]
    return Projection(
        weight=weight,
        bias=base.bias,
        a=layer.lora_A[name].weight,
        b=layer.lora_B[name].weight,
        scaling=float(layer.scaling[name]),
        dropout=dropout.p if isinstance(dropout, nn.Dropout) and layer.training else 0.0,
        packed=packed,
    )


def _frozen(base: nn.Linear) -> Tensor | FrozenWeight:
    """What kernels take: a quantised layer's weight object, else the floating matrix."""
    return base.frozen_weight() if isinstance(base, QuantizedLinear) else base.weight
