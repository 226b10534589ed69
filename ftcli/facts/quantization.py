"""What quantised weights take, and how they are multiplied. Pure arithmetic.

NF4 stores half a byte an element, and for each block of 64 a scale: one byte and, for each 256 of them, a float32 with
``double_quant``, else a float32. Tables of 16 and 256 float32 belong to each layer. Embeddings, head, norms and biases
stay in the parameters' dtype.

fp8 stores each element twice, as e4m3: by output and by input feature, each copy with a float32 scale a row.

Where weights are not multiplied as they are stored, a pass over a layer dequantises the matrices of one product: on
the kernels those that share an input are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftkernels.limits import Gpu

from ftcli.config import QuantizationConfig
from ftcli.facts.device import DeviceFacts
from ftcli.facts.precision import DtypePlan
from ftcli.facts.shape import Linear, ModelShape
from ftcli.tables import code_of, quantizations

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
    reference = quantizations.row(quantization.method).stored_bytes
    if reference is None:
        return shape.parameters * parameter_bytes
    stored_bytes: Callable[[Linear, QuantizationConfig], int] = code_of(reference)
    layer = sum(stored_bytes(linear, quantization) for linear in shape.linears)
    packed = shape.num_layers - kept_layers
    return (shape.parameters - packed * _elements(shape.linears)) * parameter_bytes + packed * layer


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


def nf4_bytes(linear: Linear, quantization: QuantizationConfig) -> int:
    """Bytes that one layer's weight takes in NF4, scales and tables included."""
    elements = linear.in_features * linear.out_features
    blocks = -(-elements // _BLOCK)
    scales = 4 * blocks
    if quantization.double_quant:
        scales = blocks + 4 * -(-blocks // _NESTED_BLOCK) + 4 * (256 + 1)
    return -(-elements // 2) + scales + 4 * 16


def fp8_bytes(linear: Linear, quantization: QuantizationConfig) -> int:
    """Bytes that one layer's weight takes in e4m3, both copies and their scales."""
    return 2 * linear.in_features * linear.out_features + 4 * (linear.in_features + linear.out_features)


def why_dequantized(quantization: QuantizationConfig, plan: DtypePlan, device: DeviceFacts) -> str | None:
    """Why the stored weights are dequantised for each product, as one clause.

    None where they are multiplied as they are stored, and where nothing is quantised.
    """
    method = quantizations.row(quantization.method)
    if method.stored_bytes is None:
        return None
    if method.products is None:
        return f"there are no products of {quantization.method} weights"
    why_not: Callable[[Gpu, str], str | None] = code_of(method.products.why_not)
    return why_not(Gpu(device.capability, device.shared_memory_bytes or 0), plan.compute)


def dequantized_bytes(
    quantization: QuantizationConfig, shape: ModelShape, plan: DtypePlan, device: DeviceFacts, *, on_kernels: bool
) -> int:
    """Bytes of the largest matrix that a pass dequantises at a time; 0 where it dequantises none."""
    if why_dequantized(quantization, plan, device) is None:
        return 0
    return plan.compute_bytes * max(_elements(group) for group in _products(shape.linears, on_kernels))


def _products(linears: Sequence[Linear], on_kernels: bool) -> list[list[Linear]]:
    alone = [[linear] for linear in linears]
    if not on_kernels:
        return alone
    return alone + [[linear for linear in linears if linear.leaf in names] for names in _GROUPS]


def _elements(linears: Sequence[Linear]) -> int:
    return sum(linear.in_features * linear.out_features for linear in linears)


def stored_method(config: Mapping[str, Any]) -> str | None:
    """The ``quantization.method`` whose packed files a config.json says that its model has; None for any other."""
    for name in quantizations.names():
        files = quantizations.row(name).packed_files
        if files is not None and code_of(files.recognise)(config):
            return name
    return None


def stores_nf4(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the weights are stored in bitsandbytes' NF4 layout."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return False
    kind = stored.get("bnb_4bit_quant_type")
    return stored.get("quant_method") == "bitsandbytes" and bool(stored.get("load_in_4bit")) and kind == "nf4"
