"""Released weights in packed forms, read into full precision tensor by tensor.

A form says which stored tensors make one weight. Names come from all files before anything is read, so parts may lie in
different files, and nothing waits in memory for its other half.

Stacks of experts in MXFP4 (gpt-oss), exactly transformers' numbers: a stack is stored as ``NAME_blocks`` (E, O, G, 16)
and ``NAME_scales`` (E, O, G), bytes: G groups of 32 inputs share a power of two. A byte holds two numbers of four bits
(sign, two bits of exponent, one of fraction), the lower half first; the scale's exponent is its byte less 127. The
model has the stack as (E, in, out).

Each number has two significant bits: bfloat16 holds it as it is, and no other tensor of the stack's size is made.

Weights in eight bits with scales (Qwen, DeepSeek, Mistral):

    W[i, j] = q[i, j] · s[i // R, j // C]      in float32, then rounded to the dtype that is asked for

q is float8 (O, I), s (⌈O/R⌉, ⌈I/C⌉); the last block of a row or column may be smaller. ``X.weight`` has its scales
beside it, as ``X.weight_scale_inv`` (the factor itself, whatever its name says) or, by compressed-tensors,
``X.weight_scale``; a stack of experts (E, O, I) as ``X_scale_inv``. Scales are float32, bfloat16, or powers of two:
float8_e8m0fnu or its bytes.

transformers computes the same, but takes R for O divided by the number of scales: where the last block is smaller it
stops, or shifts the scales where that divides evenly. Its products, and DeepSeek's own reading, do as is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ftcli.model.quantized import unreadable_weights
from ftcli.plain import JsonMap
from ftcli.plan.released import block_of, released_form
from ftcli.tables import code_of

#: The role of a tensor that has its own name in full precision.
WHOLE = ""
#: Of one that says nothing of weights.
PASSED_OVER = "-"


class Form(Protocol):
    """``read`` of a row of :mod:`ftcli.tables.released`, made of a config.json's content."""

    def part_of(self, key: str) -> tuple[str, str] | None:
        """A weight's key in full precision, and the role in it of the tensor stored under ``key``.

        None where the key is one of full precision itself, or that of a weight whose other parts say so.
        """
        ...

    def shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of a weight, by those of its parts. Raises FtcliError FT323 for parts that are missing."""
        ...

    def dequantized(self, name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A weight in ``dtype`` on ``device``. Raises FtcliError FT323 for parts that are missing or do not fit."""
        ...


def form_of(config: JsonMap) -> Form | None:
    """The form of a model's files, by config.json; None where they are in full precision, or packed otherwise."""
    found = released_form(config)
    if found is None:
        return None
    form: Form = code_of(found[0].read)(config)
    return form


def grouped(keys: Iterable[str], form: Form | None) -> dict[str, dict[str, str]]:
    """The stored tensors of each weight, by its key in full precision and by their roles, in the order of ``keys``."""
    found: dict[str, dict[str, str]] = {}
    for key in keys:
        part = None if form is None else form.part_of(key)
        name, role = (key, WHOLE) if part is None else part
        if role != PASSED_OVER:
            found.setdefault(name, {})[role] = key
    return found


def read_group(
    form: Form | None,
    name: str,
    group: Mapping[str, str],
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One weight of :func:`grouped`: as it is stored where it is whole and in no eight bits, else in full precision.

    Raises:
        FtcliError: FT323 for parts that are missing or do not fit together.
    """
    parts = {role: read(key) for role, key in group.items()}
    alone = parts[WHOLE] if set(parts) == {WHOLE} else None
    if form is None or (alone is not None and (alone.element_size() > 1 or not alone.is_floating_point())):
        return parts[WHOLE]
    return form.dequantized(name, parts, dtype, device)


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
        """See :class:`ftcli.model.released.Form`: (E, in, out), expert by expert."""
        _require_both(name, parts)
        blocks, scales = parts[BLOCKS], parts[SCALES]
        fit = blocks.dim() == 4 and blocks.shape[:-1] == scales.shape and blocks.shape[-1] == _GROUP // 2
        if not fit or {blocks.dtype, scales.dtype} != {torch.uint8}:
            said = ", ".join(
                f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in (blocks, scales)
            )
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


def _require_both(name: str, parts: Collection[str]) -> None:
    missing = next((end for end in (BLOCKS, SCALES) if end not in parts), None)
    if missing is not None:
        raise unreadable_weights(f"{name}{missing} is not stored")


_SCALE, _ACTIVATIONS, _ZERO = "scale", "activations", "zero point"
#: Ends of keys, and the roles that they give a tensor.
_ENDS = (
    ("_activation_scale", _ACTIVATIONS),
    ("_scale_inv", _SCALE),
    ("weight_scale", _SCALE),
    ("weight_zero_point", _ZERO),
)
#: Of a layer's inputs, its outputs, or the cache of keys and values, when it is served in eight bits.
_SERVED = (
    ".activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale",
    ".input_zero_point", ".output_zero_point",
)  # fmt: skip


class ScaledFp8:
    """A :class:`ftcli.model.released.Form`, by config.json's content."""

    def __init__(self, config: JsonMap) -> None:
        block = block_of(config)
        assert block is not None
        self._block = block

    def part_of(self, key: str) -> tuple[str, str] | None:
        """See :class:`ftcli.model.released.Form`."""
        if key.endswith(_SERVED):
            return key, PASSED_OVER
        for end, role in _ENDS:
            if key.endswith(end):
                name = key.removesuffix(end) + ("weight" if end.startswith("weight") else "")
                return (name, role) if role != _ACTIVATIONS else (key, PASSED_OVER)
        return None

    def shape(self, name: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """See :class:`ftcli.model.released.Form`."""
        if WHOLE not in parts:
            raise unreadable_weights(f"{name} is not stored")
        return parts[WHOLE]

    def dequantized(self, name: str, parts: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :class:`ftcli.model.released.Form`. A stack is read expert by expert."""
        self.shape(name, {role: tuple(part.shape) for role, part in parts.items()})
        stored = parts[WHOLE]
        if _SCALE not in parts:
            raise unreadable_weights(f"{name} is stored in eight bits and its scales are not")
        if stored.element_size() > 1 or not stored.is_floating_point() or stored.dim() not in (2, 3):
            raise unreadable_weights(f"{name} has scales, and is {_told(stored)}")
        if _ZERO in parts and bool(parts[_ZERO].float().count_nonzero()):
            raise unreadable_weights(f"{name} has zero points, which fp8 has not")
        matrices = stored if stored.dim() == 3 else stored[None]
        scales, wide = self._by_expert(name, stored, parts[_SCALE])
        made = torch.empty(matrices.shape, dtype=dtype, device=device)
        for at, matrix in enumerate(matrices):
            by_row = self._of_rows(_in_float(scales[at].to(device)), matrix.shape[0])
            made[at] = _scaled(matrix.to(device).to(torch.float32), by_row, wide)
        return made.view(stored.shape)

    def _by_expert(self, name: str, stored: Tensor, scales: Tensor) -> tuple[Tensor, int]:
        """Scales (experts, parts, blocks of a part's rows, blocks of columns), and the columns of a block.

        Parts are 1, or 2 where a stack's gate and up projections were one behind the other, each with its own blocks.
        """
        experts = stored.shape[:-2]
        rows, columns = stored.shape[-2:]
        high, wide = (size or whole for size, whole in zip(self._block, (rows, columns), strict=True))
        across = -(-columns // wide)
        for parts in (1, 2) if experts and rows % 2 == 0 else (1,):
            grid = (parts, -(-(rows // parts) // high), across)
            if _without_ones(scales.shape) == _without_ones((*experts, grid[0] * grid[1], across)):
                return scales.reshape(-1, *grid), wide
        told = f"{_told(stored)}, and its scales are {_told(scales)}"
        raise unreadable_weights(f"{name} is {told}: blocks are of {high} x {wide}")

    def _of_rows(self, scales: Tensor, rows: int) -> Tensor:
        """The scales of each row of a matrix (rows, blocks of columns), of one expert's (parts, ...)."""
        each = rows // scales.shape[0]
        return scales.repeat_interleave(self._block[0] or rows, 1)[:, :each].flatten(0, 1)


def _scaled(numbers: Tensor, by_row: Tensor, wide: int) -> Tensor:
    """``numbers`` (O, I) in float32 times the scale of each block of ``wide`` columns, in their own memory."""
    whole = numbers.shape[1] // wide
    numbers[:, : whole * wide].unflatten(1, (whole, wide)).mul_(by_row[:, :whole, None])
    numbers[:, whole * wide :].mul_(by_row[:, whole:])
    return numbers


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _in_float(scales: Tensor) -> Tensor:
    """Scales in float32; bytes are exponents."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
