"""Stacks of experts in MXFP4, as gpt-oss is released, read into full precision: exactly transformers' numbers.

A stack is stored as ``NAME_blocks`` (E, O, G, 16) and ``NAME_scales`` (E, O, G), bytes: G groups of 32 inputs share a
power of two. A byte holds two numbers of four bits (sign, two bits of exponent, one of fraction), the lower half first;
the scale's exponent is its byte less 127. The model has the stack as (E, in, out).

Each number has two significant bits: bfloat16 holds it as it is, and no other tensor of the stack's size is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ftcli.model.quantized import unreadable_weights
from ftcli.model.released import WHOLE
from ftcli.plain import JsonMap

#: Both tensors of a stack, by the ends of their names.
BLOCKS, SCALES = "_blocks", "_scales"
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP, _BIAS = 32, 127


class Mxfp4:
    """A :class:`ftcli.model.released.Form`; config.json says nothing that it needs."""

    def __init__(self, config: JsonMap) -> None:
        """Every such file has one layout."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """See :class:`ftcli.model.released.Form`."""
        end = next((end for end in (BLOCKS, SCALES) if key.endswith(end)), None)
        return None if end is None else (key.removesuffix(end), end)

    def shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """See :class:`ftcli.model.released.Form`."""
        if set(parts) == {WHOLE}:
            return parts[WHOLE]
        _require_both(name, parts)
        if len(parts[SCALES]) != 3:
            raise unreadable_weights(f"{name}{SCALES} has shape {parts[SCALES]}")
        experts, rows, groups = parts[SCALES]
        return experts, groups * _GROUP, rows

    def dequantized(self, name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`ftcli.model.released.Form`."""
        return dequantized(name, parts, dtype, device)


def _require_both(name: str, parts: Collection[str]) -> None:
    missing = next((end for end in (BLOCKS, SCALES) if end not in parts), None)
    if missing is not None:
        raise unreadable_weights(f"{name}{missing} is not stored")


def dequantized(name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A stack (E, in, out) on ``device``, expert by expert.

    Args:
        parts: Both tensors, by the ends of their names.

    Raises:
        FtcliError: FT323 for parts that are missing or do not fit together.
    """
    _require_both(name, parts)
    blocks, scales = parts[BLOCKS], parts[SCALES]
    fit = blocks.dim() == 4 and blocks.shape[:-1] == scales.shape and blocks.shape[-1] == _GROUP // 2
    if not fit or {blocks.dtype, scales.dtype} != {torch.uint8}:
        said = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (blocks, scales))
        raise unreadable_weights(f"{name}{BLOCKS} and {SCALES} do not fit together: {said}")
    experts, rows, groups, _ = blocks.shape
    table = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)), dtype=torch.float32, device=device)
    made = torch.empty((experts, groups * _GROUP, rows), dtype=dtype, device=device)
    for expert in range(experts):
        packed, exponents = blocks[expert].to(device), scales[expert].to(device, torch.int32) - _BIAS
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).view(rows, groups, _GROUP)
        numbers = torch.ldexp(table[pairs.int()], exponents[..., None])
        made[expert] = numbers.view(rows, -1).T
    return made
