"""The base weights as training computed with them: for quantized ones, the numbers that they stand for.

A linear layer that training quantized is quantized here in the same way from the same stored weight, or read from the
same packed file, and then dequantized into the dtype of training's products. So an adapter is merged with the very
matrix that it was trained beside, and not with the full-precision one before rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ftcli.config.model import QuantizationConfig
from ftcli.errors import ExitCode, FtcliError
from ftcli.export.source import ExportSource
from ftcli.export.tensorfile import DTYPES, TensorEntry
from ftcli.model.quantized import (
    PackedReader,
    QuantizedLinear,
    can_be_packed,
    layers_to_quantize,
    packed_reader,
    quantize_linear,
    stores_packed,
    unreadable_weights,
)
from ftcli.plain import JsonMap
from ftcli.plan.quantization import stored_method
from ftcli.tables import quantizations

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class BaseInTraining:
    """The form of the base's linear layers in training.

    Attributes:
        settings: The quantization.
        dtype: Of training's products, into which the weights were dequantized for them.
        linears: Names of the weights that it made of full-precision ones; empty where the files are quantized.
        reader: What reads quantized files.
    """

    settings: QuantizationConfig
    dtype: torch.dtype
    linears: frozenset[str]
    reader: PackedReader | None

    @property
    def stored(self) -> bool:
        """True if the base's files are quantized themselves."""
        return self.reader is not None

    def quantizes(self, name: str) -> bool:
        """True if training quantized this weight of the files."""
        return name in self.linears

    def packed_part(self, key: str, entry: TensorEntry) -> tuple[str, str] | None:
        """Layer and part that a stored tensor of quantized files is; None for one in full precision."""
        if self.reader is None:
            return None
        found = self.reader.part_of(key)
        if found is not None:
            return found
        layer, _, leaf = key.rpartition(".")
        if leaf != "weight" or entry.dtype not in DTYPES:
            return None
        outline = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
        packed = not outline.is_floating_point() or self.reader.is_packed(outline)
        return (layer, "weight") if packed else None

    def unpacked(self, parts: Mapping[str, Tensor], model: PreTrainedModel, name: str) -> Tensor:
        """The numbers (out, in) that a layer of quantized files stands for. Raises FtcliError FT323 where none."""
        layer = name.removesuffix(".weight")
        module = model.get_submodule(layer)
        if self.reader is None or not can_be_packed(layer, module):
            raise unreadable_weights(f"{layer} is stored quantized, and ftcli keeps it in full precision")
        assert isinstance(module, nn.Linear)
        plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        try:
            return self._numbers(self.reader.layer(parts, plain, layer))
        except ValueError as error:
            raise unreadable_weights(f"{layer}: {error}") from error

    def as_in_training(self, name: str, tensor: Tensor) -> Tensor:
        """A stored tensor as training held it."""
        if name not in self.linears:
            return tensor
        linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(tensor, requires_grad=False)
        layer = quantize_linear(linear, self.settings, name.removesuffix(".weight"))
        assert isinstance(layer, QuantizedLinear)
        return self._numbers(layer)

    def _numbers(self, layer: QuantizedLinear) -> Tensor:
        weight: Any = layer.frozen_weight()
        numbers: Tensor = weight.dequantize(self.dtype)
        return numbers

    def said(self) -> str:
        """For the record and the model card."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"the {self.settings.method} weights that were trained against, dequantized in {dtype}"


#: The same, of weights that are taken as they are stored.
ORIGINAL = "the base model's weights as they are stored"


def base_in_training(source: ExportSource, config: PretrainedConfig, model: PreTrainedModel) -> BaseInTraining | None:
    """Finds the form of ``source``'s base in training; None if it is taken as it is stored.

    Args:
        config: The base's, ``model``: the same without memory.

    Raises:
        FtcliError: FT740 for ``export.base: original`` where the files themselves are quantized.
    """
    raw: JsonMap = config.to_dict()
    settings, original = source.quantization, source.settings.base == "original"
    method = stored_method(raw)
    if quantizations.row(settings.method).quantize is None and method is not None:
        settings = QuantizationConfig(method=method)  # an adapter in any folder, of which no recipe is known
    if quantizations.row(settings.method).quantize is None:
        return None
    stored = stores_packed(raw, settings)
    if original and stored:
        raise FtcliError.single(
            "FT740",
            f"export.base: original needs full-precision weights, and {source.base.name_or_path} is stored in "
            f"{settings.method}",
            exit_code=ExitCode.RECIPE,
            origin=source.origins.at("export.base"),
            help="leave export.base out",
        )
    if original:
        return None
    linears = frozenset[str]() if stored else frozenset(f"{name}.weight" for name in layers_to_quantize(model))
    return BaseInTraining(
        settings, getattr(torch, source.compute), linears, packed_reader(settings, raw) if stored else None
    )
