"""Quantises linear layers by the recipe's method, and says what the code of a quantisation's row must offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from ftcli.config import QuantizationConfig
from ftcli.model.quantized import QuantizedLinear
from ftcli.tables import code_of, quantizations


class QuantizeLinear(Protocol):
    """``quantize`` of a row of :mod:`ftcli.tables.quantizations`."""

    def __call__(self, linear: nn.Linear, settings: QuantizationConfig, name: str) -> QuantizedLinear:
        """The layer with its weight (O, I) quantised, on the device where it is; the bias is shared.

        Raises:
            FtcliError: FT323 when the weight holds NaN or infinity.
        """
        ...


class PackedReader(Protocol):
    """``packed_files.read`` of a row of :mod:`ftcli.tables.quantizations`: makes layers of files that are quantised."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """Layer and part that the stored tensor ``key`` is, such as ``absmax``; None for a tensor of another kind."""
        ...

    def is_packed(self, weight: Tensor) -> bool:
        """Whether the floating tensor that is stored under a layer's ``weight`` holds packed bytes."""
        ...

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> QuantizedLinear:
        """The quantised layer in the place of ``linear``, made of its parts by name; ``weight`` is one of them.

        Raises:
            ValueError: A part is missing or does not fit.
        """
        ...


def is_quantizable(name: str, module: nn.Module) -> bool:
    """Whether a module's weight is stored quantised: every plain linear layer but the head, which the loss reads, and
    the time step's of state-space mixers, which they read themselves.
    """
    return type(module) is nn.Linear and name.rpartition(".")[2] not in ("lm_head", "dt_proj")


def quantize_linear(linear: nn.Linear, settings: QuantizationConfig, name: str) -> QuantizedLinear:
    """``linear``'s weight quantised by ``settings.method``, on the device where it is; its bias is shared.

    Raises:
        ValueError: The method stores no quantised linear layers.
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    reference = quantizations.row(settings.method).quantize
    if reference is None:
        raise ValueError(f"quantization.method {settings.method} does not quantise linear layers")
    quantize: QuantizeLinear = code_of(reference)
    return quantize(linear, settings, name)


def packed_reader(settings: QuantizationConfig) -> PackedReader | None:
    """What reads the method's packed files; None where it has none."""
    files = quantizations.row(settings.method).packed_files
    if files is None:
        return None
    reader: PackedReader = code_of(files.read)()
    return reader
