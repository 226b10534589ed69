"""PEFT's LoRA layers as plain data for the kernels: whether one can be fused, and what it holds right now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ftkernels.projection import FrozenWeight, Packed, Projection
from ftkernels.side_stream import DeferredStream
from torch import Tensor, nn

from ftcli.model.joint import JoinedLinear
from ftcli.model.quantized import DequantizedLinear, QuantizedLinear
from ftcli.plan.execution import DORA, TRAINED_WHOLE


class PreparedGroup(NamedTuple):
    """What is made already for the projections of a group: their adapters, packed, or copies of their trained weights
    in the dtype of the products, one for each. Without, they are made in each call. ``deferred``: where the gradients
    of adapters may be made.
    """

    packed: Packed | None = None
    copies: tuple[Tensor, ...] = ()
    deferred: DeferredStream | None = None


class LayerPacks(NamedTuple):
    """What is prepared for each group of a layer."""

    qkv: PreparedGroup = PreparedGroup()
    o: PreparedGroup = PreparedGroup()
    gate_up: PreparedGroup = PreparedGroup()
    down: PreparedGroup = PreparedGroup()


#: Each group prepares its own.
UNPACKED = LayerPacks()
_NOTHING = PreparedGroup()


def why_not_fused(layer: nn.Module) -> str | None:
    """Why the fused layers cannot take this linear layer; None when they can."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper

    base = layer
    if isinstance(layer, ModulesToSaveWrapper):
        return TRAINED_WHOLE
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
    if type(base) is not nn.Linear and not isinstance(base, QuantizedLinear | DequantizedLinear | JoinedLinear):
        return f"its base is a {type(base).__name__}, not a plain linear layer"
    if isinstance(base, QuantizedLinear) and base.rounds_input:
        return f"its {base.method} products round activations to int8, which the fused layers do not"
    if base is not layer and (base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad)):
        return "its base weight is trained beside an adapter"
    return None


def projections_of(layers: Sequence[Any], prepared: PreparedGroup = _NOTHING) -> list[Projection]:
    """:func:`projection_of` each layer of a group."""
    copies = prepared.copies or (None,) * len(layers)
    pairs = zip(layers, copies, strict=True)
    return [projection_of(layer, prepared.packed, copy, prepared.deferred) for layer, copy in pairs]


def projection_of(
    layer: Any, packed: Packed | None = None, copy: Tensor | None = None, deferred: DeferredStream | None = None
) -> Projection:
    """The layer's weight, bias and active adapter; without the adapter while it is disabled or merged.

    ``packed``, ``copy`` and ``deferred`` are of :class:`PreparedGroup`: the copy of its own weight.
    """
    base = getattr(layer, "base_layer", layer)
    weight = _frozen(base)
    if base is layer or layer.disable_adapters or layer.merged or not layer.active_adapters:
        return Projection(weight, base.bias, copy=copy)
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
        deferred=deferred,
    )


def _frozen(base: nn.Linear) -> Tensor | FrozenWeight:
    """What kernels take: a quantised layer's weight object, else the floating matrix."""
    return base.frozen_weight() if isinstance(base, QuantizedLinear) else base.weight
