"""Stacks of experts whose frozen weights are stored quantized, as parameters under their own names.

transformers and PEFT take a stack for a parameter of three dimensions, so it has to be a tensor. This one has the shape
and dtype of the stack and holds its packed parts; whatever torch is asked to compute with it gets the numbers that they
stand for, for that one operation. The kernels take the packed form (:func:`packed_stack`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from ftkernels.projection import FrozenWeight
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ftcli.config.model import QuantizationConfig
from ftcli.model.quantized import unreadable_weights
from ftcli.tables import code_of, quantizations


class QuantizedStack(Tensor):
    """(E, O, I) in a floating dtype, stored as a quantized matrix (E * O, I)."""

    packed: FrozenWeight
    method: str

    @staticmethod
    def __new__(cls, packed: Any, shape: torch.Size, dtype: torch.dtype, method: str) -> QuantizedStack:
        made: QuantizedStack = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed, made.method = packed, method
        return made

    def __init__(self, *_: Any) -> None:
        """All is done where it is made."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Moving, copying and detaching keep it packed; every other operation gets it dequantized."""
        kwargs = kwargs or {}
        if func in _KEEPING:
            stack: QuantizedStack = args[0]
            dtype, device = kwargs.get("dtype") or stack.dtype, kwargs.get("device") or stack.device
            copied = func is torch.ops.aten.clone.default
            packed = _moved(stack.packed, lambda x: x.to(device, copy=copied))
            return QuantizedStack(packed, stack.shape, dtype, stack.method)
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is stored."""
        return int(self.packed.stored_bytes)  # type: ignore[attr-defined]


#: Operations after which a stack is one still.
_KEEPING = (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


def _dense(value: Any) -> Any:
    if not isinstance(value, QuantizedStack):
        return value
    return value.packed.dequantize(value.dtype).view(value.shape)


def _moved(packed: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """A quantized weight with each tensor of its parts moved."""
    changed = {}
    for field in fields(packed):
        value = getattr(packed, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = move(value)
        elif is_dataclass(value):
            changed[field.name] = _moved(value, move)
    return replace(packed, **changed)


def packed_stack(weight: Tensor) -> Tensor | FrozenWeight:
    """The stack as the kernels take it: (E, O, I), or packed as (E * O, I)."""
    return weight.packed if isinstance(weight, QuantizedStack) else weight


def quantizes_stacks(settings: QuantizationConfig) -> bool:
    """True if the method stores experts quantized, too."""
    return quantizations.row(settings.method).quantize_stack is not None


def is_stack(leaf: str, weight: Tensor) -> bool:
    """True if a parameter is a stack of experts' matrices."""
    return weight.dim() == 3 and leaf in ("gate_up_proj", "down_proj")


def quantized_stack(weight: Tensor, settings: QuantizationConfig, dtype: torch.dtype, name: str) -> nn.Parameter:
    """``weight`` (E, O, I) as the method stores it, on the device where it is; ``dtype``: what it is computed in.

    Raises:
        FtcliError: FT323 when the weight holds NaN or infinity.
    """
    quantize = quantizations.row(settings.method).quantize_stack
    assert quantize is not None
    try:
        packed = code_of(quantize)(weight.reshape(-1, weight.shape[-1]), settings)
    except ValueError as error:
        raise unreadable_weights(f"{name} {tuple(weight.shape)}: {error}") from error
    stack = QuantizedStack(packed, weight.shape, dtype, settings.method)
    return nn.Parameter(stack, requires_grad=False)
