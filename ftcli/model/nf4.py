"""Linear layers whose frozen weight is stored in NF4, made of full-precision weights or of bitsandbytes' files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import torch
from ftkernels.nf4 import NF4_TABLE, NestedScales, NF4Weight, quantize_nf4
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import QuantizedLinear, unreadable_weights
from ftcli.plain import JsonMap, JsonObject

_PART = re.compile(
    r"(?P<layer>.+)\.weight\.(?P<part>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)


class NF4Linear(QuantizedLinear):
    """A frozen linear layer in NF4: the parts of an ``ftkernels.nf4.NF4Weight``, as buffers.

    Off the kernels a pass dequantizes the weight, multiplies and frees it; backward does the same again.
    """

    method = "nf4"
    sharded = ("packed", "absmax")

    def __init__(self, weight: NF4Weight, bias: Tensor | None, name: str) -> None:
        super().__init__(int(weight.shape[1]), int(weight.shape[0]), bias, name)
        self.block_size = weight.block_size
        nested = weight.nested
        self.nested_block_size = 0 if nested is None else nested.block_size
        self.register_buffer("packed", weight.data)
        self.register_buffer("absmax", weight.absmax)
        self.register_buffer("table", weight.table)
        self.register_buffer("nested_absmax", None if nested is None else nested.absmax)
        self.register_buffer("nested_table", None if nested is None else nested.table)
        self.register_buffer("nested_offset", None if nested is None else nested.offset)

    @property
    def double_quant(self) -> bool:
        return self.nested_block_size > 0

    def frozen_weight(self) -> NF4Weight:
        """See :meth:`ftcli.model.quantized.QuantizedLinear.frozen_weight`; nothing is copied."""
        names = ("packed", "absmax", "table") + (
            ("nested_absmax", "nested_table", "nested_offset") if self.double_quant else ()
        )
        parts = [self.state(name) for name in names]
        missing = [name for name, part in zip(names, parts, strict=True) if part is None]
        if missing:
            raise self.state_lost(f"{', '.join(missing)} gone")
        packed, absmax, table, *rest = [part for part in parts if part is not None]
        try:
            nested = NestedScales(rest[0], rest[1], rest[2], self.nested_block_size) if rest else None
            shape = torch.Size((self.out_features, self.in_features))
            return NF4Weight(packed, absmax, table, shape, self.block_size, nested)
        except ValueError as error:
            raise self.state_lost(str(error)) from error

    def check_state(self) -> None:
        """Requires the table to be NF4's and every scale to be finite."""
        weight = self.frozen_weight()
        if tuple(weight.table.tolist()) != NF4_TABLE:
            raise self.state_lost("its table is not NF4's, so its memory was never written")
        scales = weight.absmax if weight.nested is None else weight.nested.absmax
        if not bool(torch.isfinite(scales).all()):
            raise self.state_lost("its scales are not finite")


def nf4_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> NF4Linear:
    """``linear``'s weight in NF4, on the device where it is; its bias is shared.

    Raises:
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    try:
        weight = quantize_nf4(linear.weight, double_quant=settings.double_quant)
    except ValueError as error:
        raise unreadable_weights(f"{name} {tuple(linear.weight.shape)}: {error}") from error
    return NF4Linear(weight, linear.bias, name)


def nf4_stack(weight: Tensor, settings: QuantizationConfig) -> NF4Weight:
    """All experts' matrices, one below the other, in NF4. Raises ValueError where they hold NaN or infinity."""
    return quantize_nf4(weight, double_quant=settings.double_quant)


class BitsandbytesReader:
    """Reads the layout in which bitsandbytes saves NF4; needs neither bitsandbytes nor a GPU.

    A layer is stored as ``weight`` (the packed bytes) and ``weight.absmax``, ``weight.quant_map``,
    ``weight.nested_absmax``, ``weight.nested_quant_map`` and ``weight.quant_state.bitsandbytes__nf4``.
    """

    def __init__(self, config: JsonMap) -> None:
        """The files say all that there is to know."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """See :meth:`ftcli.model.quantized.PackedReader.part_of`."""
        found = _PART.fullmatch(key)
        return None if found is None else (found["layer"], found["part"])

    def is_packed(self, weight: Tensor) -> bool:
        """See :meth:`ftcli.model.quantized.PackedReader.is_packed`: the bytes, as any dtype, are a single column."""
        return weight.shape[-1:] == (1,)

    def add(self, parts: Mapping[str, Tensor], layer: nn.Module) -> None:
        """See :meth:`ftcli.model.quantized.PackedReader.add`: there is nothing to lie beside a whole weight."""
        raise ValueError(f"it is stored in full precision, and packed: {', '.join(sorted(parts))}")

    def require(self, model: nn.Module) -> None:
        """See :meth:`ftcli.model.quantized.PackedReader.require`: config.json says nothing of single layers."""

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> NF4Linear:
        """See :meth:`ftcli.model.quantized.PackedReader.layer`."""
        shape = torch.Size((linear.out_features, linear.in_features))
        return NF4Linear(nf4_from_bitsandbytes(parts, shape), linear.bias, name)


def nf4_from_bitsandbytes(parts: Mapping[str, Tensor], shape: torch.Size) -> NF4Weight:
    """A weight from the tensors of bitsandbytes' file layout, keyed by what follows the layer's name.

    Raises:
        ValueError: a tensor is missing, the numbers are not NF4, or the parts do not make a matrix of ``shape``.
    """
    states = [key for key in parts if key.startswith("quant_state.")]
    if states and not states[0].endswith("__nf4"):
        raise ValueError(f"it is stored as {states[0].rpartition('__')[2]}, and only nf4 is read")
    missing = [key for key in ("weight", "absmax", "quant_map") if key not in parts]
    if not states or missing:
        raise ValueError(f"it is stored packed, without its {', '.join(missing) or 'quant_state'}")
    state: JsonObject = json.loads(bytes(parts[states[0]].cpu().tolist()).decode("utf-8"))
    if tuple(parts["quant_map"].float().tolist()) != NF4_TABLE:
        raise ValueError("its quant_map is not NF4's")
    if tuple(state["shape"]) != tuple(shape):
        raise ValueError(f"its state is of a matrix {tuple(state['shape'])}")
    nested = None
    if "nested_blocksize" in state:
        if "nested_absmax" not in parts or "nested_quant_map" not in parts:
            raise ValueError("its scales are quantized, and what turns them back is missing")
        offset = torch.tensor(float(state["nested_offset"]), dtype=torch.float32, device=parts["weight"].device)
        nested = NestedScales(
            parts["nested_absmax"].float(), parts["nested_quant_map"].float(), offset, int(state["nested_blocksize"])
        )
    absmax = parts["absmax"] if nested is not None else parts["absmax"].float()
    data = parts["weight"].contiguous().view(torch.uint8).view(-1)
    return NF4Weight(data, absmax, parts["quant_map"].float(), shape, int(state["blocksize"]), nested)
