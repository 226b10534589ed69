"""Bytes of quantized weights, and whether they are multiplied as they are stored. Pure arithmetic.

Only linear layers of the decoder layers are quantized: embeddings, head, norms and biases keep the parameters' dtype.
Weights that cannot be multiplied as they are stored are dequantized for one product at a time. On the kernels, matrices
that share an input are one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ftkernels.limits import NF4_BLOCK_SIZE, NF4_NESTED_BLOCK_SIZE, Gpu

from ftcli.config.model import QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.facts.device import DeviceFacts
from ftcli.facts.layers import Linear
from ftcli.facts.shape import ModelShape
from ftcli.plain import JsonMap
from ftcli.plan.precision import DtypePlan
from ftcli.tables import code_of, quantizations

#: Share of a device's memory that ``keep_dequantized: auto`` may fill.
_AMPLE = 0.8


def weight_bytes(
    quantization: QuantizationConfig,
    shape: ModelShape,
    parameter_bytes: int,
    *,
    dequantized_layers: int = 0,
    trained: bool = False,
) -> int:
    """Bytes of the base model in memory, when ``dequantized_layers`` of its decoder layers stay dequantized.

    ``trained``: the base weights are, so linear layers hold masters and, where the method rounds them, what it makes of
    them.
    """
    method = quantizations.row(quantization.method)
    reference = method.stored_bytes
    if reference is None or (trained and method.training is None):
        return shape.parameters * parameter_bytes
    if trained and method.training is not None:
        more: Callable[[Linear, QuantizationConfig], int] = code_of(method.training.more_bytes)
        beside = _of_all(shape, lambda linear: more(linear, quantization))
        return (shape.parameters + elements_beside(quantization, shape)) * parameter_bytes + beside
    stored_bytes: Callable[[Linear, QuantizationConfig], int] = code_of(reference)
    packed = replace(shape, layers=shape.layers[dequantized_layers:])
    if not packed.layers:
        return shape.parameters * parameter_bytes
    held = _quantized(packed, stacks=method.quantize_stack is not None)
    stored = _of_all(held, lambda linear: stored_bytes(linear, quantization))
    return (shape.parameters - _of_all(held, lambda linear: _elements([linear]))) * parameter_bytes + stored


def _quantized(shape: ModelShape, *, stacks: bool) -> ModelShape:
    """The linears that are quantized: without the stacks of experts unless ``stacks``."""
    if stacks or not shape.has_experts:
        return shape
    layers = (replace(x, linears=tuple(y for y in x.linears if y.experts == 1)) for x in shape.layers)
    return replace(shape, layers=tuple(layers))


def _of_all(shape: ModelShape, count: Callable[[Linear], int]) -> int:
    """The sum over the linears of all layers."""
    return sum(shape.layers_with(linear) * count(linear) for linear in shape.linears)


def trains_rounded(recipe: Recipe) -> bool:
    """True if the base weights are trained, and rounded in every pass."""
    return recipe.lora is None and quantizations.row(recipe.quantization.method).training is not None


def elements_beside(quantization: QuantizationConfig, shape: ModelShape) -> int:
    """Elements of all layers that a method trains beside the model's own."""
    method = quantizations.row(quantization.method)
    if method.training is None:
        return 0
    more: Callable[[Linear, QuantizationConfig], int] = code_of(method.training.more_trained)
    return _of_all(shape, lambda linear: more(linear, quantization))


def layers_with_room(
    quantization: QuantizationConfig, shape: ModelShape, parameter_bytes: int, needed: int, available: int | None
) -> int:
    """Number of decoder layers that ``keep_dequantized: auto`` keeps dequantized, in a run that ``needs`` so much
    without any; 0 where what is ``available`` is not known.
    """
    if available is None:
        return 0
    packed, dense = (
        weight_bytes(quantization, shape, parameter_bytes, dequantized_layers=n) for n in (0, shape.num_layers)
    )
    layer = (dense - packed) // shape.num_layers
    return max(0, min(shape.num_layers, (int(_AMPLE * available) - needed) // layer))


def nf4_bytes(linear: Linear, quantization: QuantizationConfig) -> int:
    """Bytes that one layer's weight takes in NF4.

    Half a byte an element, a scale for each block of 64, and a table of 16 float32. A scale is a float32, or with
    ``double_quant`` one byte, with a float32 for each 256 of them, a table of 256 float32 and an offset.
    """
    elements = linear.elements
    blocks = -(-elements // NF4_BLOCK_SIZE)
    scales = 4 * blocks
    if quantization.double_quant:
        scales = blocks + 4 * -(-blocks // NF4_NESTED_BLOCK_SIZE) + 4 * (256 + 1)
    return -(-elements // 2) + scales + 4 * 16


def fp8_bytes(linear: Linear, quantization: QuantizationConfig) -> int:
    """Bytes that one layer's weight takes in e4m3: two copies, by output and by input feature, each with a float32
    scale a row; of experts the first.
    """
    if linear.experts > 1:
        return linear.elements + 4 * linear.out_features * linear.experts
    return 2 * linear.in_features * linear.out_features + 4 * (linear.in_features + linear.out_features)


def ternary_bytes(linear: Linear, quantization: QuantizationConfig) -> int:
    """Bytes of one layer's ternary values, one each, and their float32 scale."""
    return linear.in_features * linear.out_features + 4


def input_norm_elements(linear: Linear, quantization: QuantizationConfig) -> int:
    """Elements of the norm on a layer's own input."""
    return linear.in_features if quantization.use_rms_norm else 0


def why_dequantized(quantization: QuantizationConfig, dtypes: DtypePlan, device: DeviceFacts) -> str | None:
    """The reason why the stored weights are dequantized for each product, as one clause; None where they are not, or
    nothing is quantized.
    """
    method = quantizations.row(quantization.method)
    if method.stored_bytes is None:
        return None
    if method.products is None:
        return f"there are no products of {quantization.method} weights"
    why_not: Callable[[Gpu, str], str | None] = code_of(method.products.why_not)
    reason = why_not(device.gpu, dtypes.compute)
    if reason is not None or device.capability is None or device.probed:
        return reason or device.failed_products
    if method.products.known is None:
        return None
    known: Callable[[tuple[int, int]], str | None] = code_of(method.products.known)
    return known(device.capability)


def with_products_tried(device: DeviceFacts, quantization: QuantizationConfig) -> DeviceFacts:
    """This machine, with what came of trying the method's products on it. Takes seconds, once a process."""
    products = quantizations.row(quantization.method).products
    if products is None or products.tried is None or not device.probed or device.capability is None:
        return device
    if device.capability < code_of(products.capability):
        return device
    tried: Callable[[tuple[int, int]], str | None] = code_of(products.tried)
    return replace(device, failed_products=tried(device.capability))


def dequantized_bytes(
    quantization: QuantizationConfig, shape: ModelShape, dtypes: DtypePlan, device: DeviceFacts, *, on_kernels: bool
) -> int:
    """Bytes of the largest product's weights, dequantized, as experts always are; 0 where nothing is dequantized.

    A method that trains its weights takes the products of backward in the compute dtype, on every device.
    """
    method = quantizations.row(quantization.method)
    held = _quantized(shape, stacks=method.quantize_stack is not None)
    if method.training is None and why_dequantized(quantization, dtypes, device) is None:
        stacks = held.linears if method.quantize_stack is not None else ()
        return dtypes.compute_bytes * max((x.elements for x in stacks if x.experts > 1), default=0)
    return dtypes.compute_bytes * max(_elements(group) for group in _products(held, on_kernels))


def _products(shape: ModelShape, on_kernels: bool) -> list[list[Linear]]:
    alone = [[linear] for linear in shape.linears]
    if not on_kernels:
        return alone
    groups = [names for kind in shape.by_kind for names in kind.layers[0].groups]
    return alone + [[linear for linear in shape.linears if linear.name in names] for names in groups]


def _elements(linears: Sequence[Linear]) -> int:
    return sum(linear.elements for linear in linears)


def stored_method(config: JsonMap) -> str | None:
    """The ``quantization.method`` whose packed files, or masters, a config.json says that its model has; None for any
    other.
    """
    for name in quantizations.names():
        files = quantizations.row(name).packed_files
        if files is None:
            continue
        if code_of(files.recognise)(config) or (files.masters is not None and code_of(files.masters)(config)):
            return name
    return None


def stores_nf4(config: JsonMap) -> bool:
    """True if a config.json says that the weights are stored in bitsandbytes' NF4 layout."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return False
    kind = stored.get("bnb_4bit_quant_type")
    return stored.get("quant_method") == "bitsandbytes" and bool(stored.get("load_in_4bit")) and kind == "nf4"


def stores_ternary(config: JsonMap) -> bool:
    """True if a config.json says that linear layers are stored as ternary values, as transformers' `bitnet` packs them
    (what it calls online is a checkpoint of master weights).
    """
    return _ternary_mode(config) == "offline"


def stores_ternary_masters(config: JsonMap) -> bool:
    """True if a config.json says of weights in full precision that they are rounded to ternary values when used."""
    return _ternary_mode(config) == "online"


def _ternary_mode(config: JsonMap) -> str | None:
    """The kind of a `bitnet` checkpoint, as transformers calls it; None for another."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "bitnet":
        return None
    return str(stored.get("quantization_mode", "offline"))
