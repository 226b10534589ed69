"""What quantised weights take, and which stored ones can be read. Pure arithmetic.

NF4 stores half a byte an element, and for each block of 64 a scale: one byte and, for each 256 of them, a float32 with
``double_quant``, else a float32. Tables of 16 and 256 float32 belong to each layer. Embeddings, head, norms and biases
stay in the parameters' dtype.

fp8 stores each element twice, as e4m3: by output and by input feature, each copy with a float32 scale a row.

Where weights are not multiplied as they are stored, a pass over a layer dequantises the matrices of one product: on
the kernels those that share an input are one product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftcli.config import QuantizationConfig
from ftcli.facts.device import DeviceFacts
from ftcli.facts.precision import DtypePlan
from ftcli.facts.shape import Linear, ModelShape

_BLOCK = 64
_NESTED_BLOCK = 256
#: Linear layers that share an input, by what their names end in: one product on the kernels.
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


#: Share of a device's memory up to which ``keep_dequantized: auto`` spends it.
_AMPLE = 0.8


def weight_bytes(
    quantization: QuantizationConfig, shape: ModelShape, parameter_bytes: int, *, kept_layers: int = 0
) -> int:
    """Bytes of the base model as it is held, ``kept_layers`` of its decoder layers dequantised."""
    if quantization.method not in ("nf4", "fp8"):
        return shape.parameters * parameter_bytes
    quantised = sum(linear.in_features * linear.out_features for linear in shape.linears) * shape.num_layers
    if quantization.method == "fp8":
        stored = sum(fp8_bytes(linear) for linear in shape.linears)
    else:
        stored = sum(nf4_bytes(linear, double_quant=quantization.double_quant) for linear in shape.linears)
        quantised = quantised // shape.num_layers * (shape.num_layers - kept_layers)
    return (shape.parameters - quantised) * parameter_bytes + stored * (shape.num_layers - kept_layers)


def layers_with_room(
    quantization: QuantizationConfig, shape: ModelShape, parameter_bytes: int, needed: int, available: int | None
) -> int:
    """How many layers ``keep_dequantized: auto`` dequantises once and for all, where the run needs ``needed`` bytes
    without any.
    """
    if available is None:
        return 0
    packed, dense = (
        weight_bytes(quantization, shape, parameter_bytes, kept_layers=kept) for kept in (0, shape.num_layers)
    )
    layer = (dense - packed) // shape.num_layers
    return max(0, min(shape.num_layers, (int(_AMPLE * available) - needed) // layer))


def nf4_bytes(linear: Linear, *, double_quant: bool) -> int:
    """Bytes that one layer's weight takes in NF4, scales and tables included."""
    elements = linear.in_features * linear.out_features
    blocks = -(-elements // _BLOCK)
    scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 * (256 + 1) if double_quant else 4 * blocks
    return -(-elements // 2) + scales + 4 * 16


def fp8_bytes(linear: Linear) -> int:
    """Bytes that one layer's weight takes in e4m3, both copies and their scales."""
    return 2 * linear.in_features * linear.out_features + 4 * (linear.in_features + linear.out_features)


def dequantized_bytes(
    quantization: QuantizationConfig, shape: ModelShape, plan: DtypePlan, device: DeviceFacts, *, on_kernels: bool
) -> int:
    """Bytes of the largest matrix that a pass dequantises at a time; 0 without such weights.

    fp8 weights are multiplied as they are in bfloat16 on a GPU that has such products, and dequantised everywhere else.
    """
    as_stored = quantization.method == "fp8" and plan.compute == "bfloat16" and device.has_float8
    if quantization.method not in ("nf4", "fp8") or as_stored:
        return 0
    return plan.compute_bytes * max(_elements(group) for group in _products(shape.linears, on_kernels))


def _products(linears: Sequence[Linear], on_kernels: bool) -> list[list[Linear]]:
    alone = [[linear] for linear in linears]
    if not on_kernels:
        return alone
    return alone + [[linear for linear in linears if linear.leaf in names] for names in _GROUPS]


def _elements(linears: Sequence[Linear]) -> int:
    return sum(linear.in_features * linear.out_features for linear in linears)


def stores_nf4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the weights are stored in bitsandbytes' NF4 layout."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return False
    kind = stored.get("bnb_4bit_quant_type")
    return stored.get("quant_method") == "bitsandbytes" and bool(stored.get("load_in_4bit")) and kind == "nf4"
