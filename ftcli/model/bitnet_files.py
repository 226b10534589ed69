"""BitNet's layers as files have them: packed, with norms of their own, or as ternary values in full precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from ftkernels.ternary import SMALLEST, Ternary, unpack_ternary
from torch import Tensor, nn

from ftcli.model.bitnet import INPUT_NORM_EPS, BitLinear, InputNorm, TernaryLinear
from ftcli.plain import JsonMap

_NORM = ".rms_norm.weight"


def already_ternary(linear: nn.Linear, name: str) -> TernaryLinear | None:
    """``linear`` where all its weights are -a, 0 and a: what is left of ternary values that were written out in full
    precision, from GGUF or from packed files. Rounding them by their mean would shrink them by their density.
    """
    weight = linear.weight.detach()
    scale = weight.abs().amax() if weight.numel() else weight.new_zeros(())
    if not bool(scale >= SMALLEST) or not bool(torch.isfinite(scale)):
        return None
    values = weight.sign()
    if not torch.equal(values * scale, weight):
        return None
    return TernaryLinear(Ternary(values.to(torch.int8), scale.float()), linear.bias, name)


class PackedTernaryReader:
    """Reads layers as transformers' ``bitnet`` stores them: ``weight`` (O / 4, I) uint8 and ``weight_scale`` (1,).

    What the scale means depends on ``linear_class`` in config.json: ``autobitlinear`` multiplies by it, ``bitlinear``,
    which is the default, divides. With ``use_rms_norm`` every layer, packed or of masters, has an ``rms_norm.weight``
    (I,) as well.
    """

    def __init__(self, config: JsonMap) -> None:
        stored = config.get("quantization_config") or {}
        self._divides = stored.get("linear_class", "bitlinear") == "bitlinear"
        self._eps = float(stored.get("rms_norm_eps", INPUT_NORM_EPS)) if stored.get("use_rms_norm") else None

    def part_of(self, key: str) -> tuple[str, str] | None:
        """As :class:`ftcli.model.quantize.PackedReader` says."""
        if self._eps is not None and key.endswith(_NORM):
            return key.removesuffix(_NORM), "rms_norm"
        layer, _, leaf = key.rpartition(".")
        return (layer, leaf) if leaf == "weight_scale" else None

    def is_packed(self, weight: Tensor) -> bool:
        """As :class:`ftcli.model.quantize.PackedReader` says: packed values are integers, never floating."""
        return False

    def layer(self, parts: Mapping[str, Tensor], linear: nn.Linear, name: str) -> TernaryLinear:
        """As :class:`ftcli.model.quantize.PackedReader` says."""
        if "weight" not in parts or "weight_scale" not in parts:
            raise ValueError(f"it is stored packed, without its {'weight_scale' if 'weight' in parts else 'weight'}")
        values, stored = unpack_ternary(parts["weight"]), parts["weight_scale"].double()
        if values.shape != (linear.out_features, linear.in_features):
            raise ValueError(f"its packed bytes are of a matrix {tuple(values.shape)}")
        if stored.numel() != 1 or not bool((stored > 0) & torch.isfinite(stored)):
            raise ValueError("its weight_scale is not a positive number")
        scale = (1.0 / stored if self._divides else stored).float().reshape(())
        made = TernaryLinear(Ternary(values, scale), linear.bias, name)
        made.rms_norm = self._norm(parts, made, trained=False)
        return made

    def add(self, parts: Mapping[str, Tensor], layer: nn.Module) -> None:
        """As :class:`ftcli.model.quantize.PackedReader` says."""
        if not isinstance(layer, (BitLinear, TernaryLinear)):
            raise ValueError("it has a norm of its own, and ftcli keeps it in full precision")
        layer.rms_norm = self._norm(parts, layer, trained=isinstance(layer, BitLinear))

    def require(self, model: nn.Module) -> None:
        """As :class:`ftcli.model.quantize.PackedReader` says."""
        if self._eps is None:
            return
        for layer in model.modules():
            if isinstance(layer, (BitLinear, TernaryLinear)) and layer.rms_norm is None:
                raise ValueError(f"config.json says use_rms_norm, and {layer.layer_name}.rms_norm is not stored")

    def _norm(self, parts: Mapping[str, Tensor], layer: nn.Linear, *, trained: bool) -> InputNorm | None:
        weight = parts.get("rms_norm")
        if weight is None or self._eps is None:
            return None
        if weight.shape != (layer.in_features,):
            raise ValueError(f"its rms_norm has shape {tuple(weight.shape)}")
        return InputNorm(weight, self._eps, trained=trained)
