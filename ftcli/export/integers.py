"""Weights as integers times a scale: llm-compressor's ``W4A16``, ``W4A16_ASYM`` and ``W8A8``.

Of a group w of numbers of a row, q = round(w / s) + z within -8 and 7 stands for s · (q - z). s, and z where zero has a
place of its own, are those of a few multiples of the range of w which leave the least |w - s · (q - z)|²: a smaller
scale cuts the largest number, and is finer for all others. Eight integers are an int32, the first in its lowest bits,
each plus 8.

``w4a16`` rounds to the nearest. ``gptq`` (Frantar et al. 2022) takes the same scales and rounds column by column, those
with the largest inputs first; what rounding a column leaves is taken out of the columns after it by H⁻¹, H the mean of
x xᵀ over the calibration rows. ``awq`` (Lin et al. 2023) and ``w8a8`` (with SmoothQuant, Xiao et al. 2022) multiply
columns of weights by factors that the norm in front of them is divided by (:mod:`ftcli.export.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ftcli.export.compressed import write_compressed
from ftcli.export.scheme import ROOM, Calibration, Given, Parts, Scheme, Smoothing, by_rows, farther, group_of, is_scale
from ftcli.plain import JsonObject

#: Numbers of a group, by preference: vLLM's kernels take all three.
GROUPS = (128, 64, 32)
#: Multiples of the largest number's scale that are tried.
_MULTIPLES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_LEAST, _MOST = -8, 7
#: Squared error of a weight that GPTQ rounds, over that of rounding to the nearest: it moves weights to where inputs
#: do not look. 1.2 to 3.6 measured on small random models.
_MOVED = 16.0
#: Columns that are rounded before the others are brought up to date, and the share of the mean of H's diagonal that is
#: added to it: GPTQ's own.
_BLOCK, _DAMPING = 128, 0.01
_LARGEST_BYTE = 127.0


def w4a16(widths: frozenset[int]) -> Scheme:
    """Rounding to the nearest, with the largest group that divides all rows. Raises FtcliError FT740 where none is."""
    return _four_bits(group_of(widths, GROUPS))


def gptq(widths: frozenset[int]) -> Scheme:
    """As :func:`w4a16`, rounded by what the inputs are."""
    return _four_bits(group_of(widths, GROUPS), calibration=Calibration(products=True))


def awq(widths: frozenset[int]) -> Scheme:
    """As :func:`w4a16`, with zero points, and factors by the mean of the inputs."""
    group = group_of(widths, GROUPS)
    quick = partial(_rounded, group=group, symmetric=False)
    return _four_bits(group, symmetric=False, calibration=Calibration(smoothing=Smoothing("mean", quick)))


def _four_bits(group: int, *, symmetric: bool = True, calibration: Calibration | None = None) -> Scheme:
    weights: JsonObject = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "group_size": group, "strategy": "group",
        "block_structure": None, "dynamic": False, "observer": "minmax",
        "actorder": "static" if calibration is not None and calibration.products else None,
    }  # fmt: skip

    def parts(shape: tuple[int, ...]) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        groups = shape[1] // group
        zeros = {} if symmetric else {"weight_zero_point": ((-(-shape[0] // 8), groups), torch.int32)}
        return {
            "weight_packed": ((shape[0], shape[1] // 8), torch.int32),
            "weight_scale": ((shape[0], groups), torch.bfloat16),
            "weight_shape": ((2,), torch.int64),
            **zeros,
        }

    return Scheme(
        bits=4,
        layout="pack-quantized",
        numbers={"weights": weights, "input_activations": None},
        parts=parts,
        encode=partial(encoded, group=group, symmetric=symmetric),
        decode=decoded,
        unlike=partial(_unlike, group=group, symmetric=symmetric),
        tolerance=0.5,  # 0.19 to 0.30 measured on small random models, groups of 32 and 64
        calibration=calibration,
    )


def encoded(weight: Tensor, given: Given | None = None, *, group: int, symmetric: bool = True) -> Parts:
    """The parts of ``weight`` (O, I) float32: ``weight_packed`` (O, I / 8), ``weight_scale`` (O, I / group),
    ``weight_shape`` and, of what is not symmetric, ``weight_zero_point`` (O / 8, I / group).
    """
    compensates = symmetric and given is not None and given.products is not None

    def rounded(rows: Tensor) -> tuple[Tensor, ...]:
        groups = rows.unflatten(1, (-1, group))
        scale, zero = _best(groups, symmetric)
        packed = scale if compensates else _packed(_integers(groups, scale, zero).flatten(1))
        return packed, scale, zero[..., 0]

    packed, scale, zero = by_rows(rounded, weight)
    if compensates:
        assert given is not None
        assert given.products is not None
        packed = _packed(compensated(weight, scale.expand(-1, -1, group).flatten(1), given.products))
    zeros = {} if symmetric else {"weight_zero_point": _packed(zero.T).T.contiguous()}
    return {
        "weight_packed": packed,
        "weight_scale": scale[..., 0].to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
        **zeros,
    }


def decoded(parts: Parts) -> Tensor:
    """The weight (O, I) float32 that the parts stand for."""
    scale = parts["weight_scale"].float()
    groups = _unpacked(parts["weight_packed"], int(parts["weight_shape"][1])).unflatten(1, (scale.shape[1], -1))
    if "weight_zero_point" in parts:
        groups = groups - _unpacked(parts["weight_zero_point"].T, scale.shape[0]).T[..., None]
    weight: Tensor = (groups * scale[..., None]).flatten(1)
    return weight


def compensated(weight: Tensor, scale: Tensor, products: Tensor) -> Tensor:
    """The integers (O, I), each within -8 and 7, that GPTQ rounds ``weight`` to.

    Args:
        scale: (O, I), that of each number.
        products: The mean of ``x xᵀ`` over inputs x: (I, I).
    """
    order = products.diagonal().argsort(descending=True)
    inverse = _inverse_root(products[order][:, order])
    # Columns as rows, which lie together in memory.
    left, units = weight[:, order].T.contiguous(), scale[:, order].T.contiguous()
    codes = torch.empty_like(left)
    for first in range(0, len(left), _BLOCK):
        last = min(first + _BLOCK, len(left))
        errors = torch.empty_like(left[first:last])
        for column in range(first, last):
            unit = units[column]
            codes[column] = torch.clamp((left[column] / unit).round(), _LEAST, _MOST)
            error = (left[column] - codes[column] * unit) / inverse[column, column]
            left[column:last] -= inverse[column, column:last, None] * error
            errors[column - first] = error
        left[last:] -= inverse[first:last, last:].T @ errors
    return codes[order.argsort()].T.contiguous()


def _inverse_root(products: Tensor) -> Tensor:
    """U, upper triangular, with UᵀU = (H + δ)⁻¹; a feature that was never there has a 1 in H's diagonal."""
    diagonal = products.diagonal()
    mean = float(diagonal.mean()) or 1.0
    damping = _DAMPING
    while True:
        damped = products + torch.diag(torch.where(diagonal > 0, damping * mean, mean))
        root, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(root), upper=True)
            if not int(failed):
                return upper
        damping *= 10  # float32 cannot hold what is left of it


def _best(groups: Tensor, symmetric: bool, *, quick: bool = False) -> tuple[Tensor, Tensor]:
    """Scale, in float32 as bfloat16 holds it, and zero point of each group (O, groups, 1).

    ``quick``: The scale of the largest number, without trying others.
    """
    high, low = groups.amax(-1, keepdim=True).clamp(min=0), groups.amin(-1, keepdim=True).clamp(max=0)
    best = torch.full_like(high, torch.inf)
    scale, zero = torch.ones_like(high), torch.zeros_like(high)
    for multiple in _MULTIPLES[:1] if quick else _MULTIPLES:
        range_of = torch.maximum(high, -low) / _MOST if symmetric else (high - low) / (_MOST - _LEAST)
        tried = (range_of * multiple).to(torch.bfloat16).float()
        tried = torch.where(tried > 0, tried, 1.0)
        place = torch.zeros_like(tried)
        if not symmetric:
            place = torch.clamp((_LEAST - multiple * low / tried).round(), _LEAST, _MOST)
        error = (groups - tried * (_integers(groups, tried, place) - place)).square().sum(-1, keepdim=True)
        scale, zero = torch.where(error < best, tried, scale), torch.where(error < best, place, zero)
        best = torch.minimum(error, best)
    return scale, zero


def _integers(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.clamp((groups / scale).round() + zero, _LEAST, _MOST)


def _rounded(weight: Tensor, group: int, symmetric: bool) -> Tensor:
    """``weight`` rounded with the scale of its largest number."""
    groups = weight.unflatten(1, (-1, group))
    scale, zero = _best(groups, symmetric, quick=True)
    return (scale * (_integers(groups, scale, zero) - zero)).flatten(1)


def _packed(codes: Tensor) -> Tensor:
    """Integers (rows, n) from -8 to 7 as int32 (rows, n / 8)."""
    shifted = functional.pad(codes.to(torch.int64) - _LEAST, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    packed = (shifted << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    """``count`` integers of each row, in float32."""
    codes = (packed.to(torch.int64)[..., None] >> torch.arange(0, 32, 4, device=packed.device)) & 15
    return (codes.flatten(1)[:, :count] + _LEAST).float()


def _unlike(parts: Parts, wanted: Tensor, given: Given | None, group: int, symmetric: bool) -> str | None:
    scale = parts["weight_scale"]
    if not is_scale(scale):
        return "has a scale that is not a positive number"
    if parts["weight_shape"].tolist() != list(wanted.shape):
        return f"says that its shape is {parts['weight_shape'].tolist()}"
    found, best = decoded(parts), decoded(encoded(wanted, group=group, symmetric=symmetric))
    if given is None or not symmetric:
        return "lies farther from what was trained than four bits need" if farther(found, best, wanted, group) else None
    # GPTQ moves numbers, and takes the scales as they are.
    groups = wanted.unflatten(1, (-1, group))
    unit = scale.float()[..., None]
    nearest = (unit * _integers(groups, unit, torch.zeros_like(unit))).flatten(1)
    if farther(nearest, best, wanted, group):
        return "has scales that are not those of its groups"
    moved, least = ((each - wanted).square().sum() for each in (found, best))
    return "lies farther from what was trained than GPTQ moves it" if float(moved) > _MOVED * float(least) else None


def _bytes(weight: Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / _LARGEST_BYTE
    scale = torch.where(scale > 0, scale, 1.0)
    codes = torch.clamp((weight / scale).round(), -_LARGEST_BYTE, _LARGEST_BYTE)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _of_bytes(parts: Parts) -> Tensor:
    return parts["weight"].float() * parts["weight_scale"]


def _rounded_bytes(rows: Tensor) -> Tensor:
    """Rows in eight bits each: weights by output channel, inputs by token."""
    return _of_bytes(_bytes(rows))


def _unlike_bytes(parts: Parts, wanted: Tensor, _: Given | None) -> str | None:
    if not is_scale(parts["weight_scale"]):
        return "has a scale that is not a positive number"
    best = _rounded_bytes(wanted)
    if farther(_of_bytes(parts), best, wanted, wanted.shape[1], ROOM):
        return "lies farther from what was trained than eight bits need"
    return None


_BYTES: JsonObject = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "block_structure": None}

W8A8 = Scheme(
    bits=8,
    layout="int-quantized",
    numbers={
        "weights": {**_BYTES, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**_BYTES, "strategy": "token", "dynamic": True, "observer": None},
    },
    parts=lambda shape: {"weight": (shape, torch.int8), "weight_scale": ((shape[0], 1), torch.float32)},
    encode=lambda weight, _: _bytes(weight),
    decode=_of_bytes,
    unlike=_unlike_bytes,
    tolerance=0.25,  # 0.02 to 0.03 measured on small random models, 0.12 on one with delta nets
    calibration=Calibration(smoothing=Smoothing("largest", _rounded_bytes, _rounded_bytes)),
)

write_w4a16 = partial(write_compressed, scheme_of=w4a16)
write_gptq = partial(write_compressed, scheme_of=gptq)
write_awq = partial(write_compressed, scheme_of=awq)
write_w8a8 = partial(write_compressed, scheme_of=lambda _: W8A8)
