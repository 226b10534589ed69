"""Quantising a model that is already there, for tests; ftcli quantises while it loads (``ftcli.model.streamed``)."""

from __future__ import annotations

from torch import nn

from ftcli.config import QuantizationConfig
from ftcli.model.quantized import is_quantizable, quantize_linear


def quantize_linears(model: nn.Module, settings: QuantizationConfig) -> int:
    """Puts a quantised layer in the place of each linear layer but the head; returns how many."""
    names = [name for name, module in model.named_modules() if is_quantizable(name, module)]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, quantize_linear(linear, settings, name))
    return len(names)
