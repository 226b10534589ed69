"""Weights as small floats times a scale: llm-compressor's ``FP8_DYNAMIC``, ``NVFP4`` and ``MXFP4A16``, and fp8 with
static scales of the inputs.

``fp8`` is float8_e4m3fn with a scale (O, 1) for each output channel: the row's largest number over 448, rounded up to
what bfloat16 holds. Programs that keep it in bfloat16 and those that keep it in float32 compute with the same number,
and no weight ends beyond what the type holds. Inputs are rounded by token while the model is served, or, in
``fp8_static``, by the largest number of the calibration rows over 448.

The four-bit floats are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, two in a byte, the first in its lower half.
``nvfp4``: a scale in float8_e4m3fn for 16 numbers, the best of a few, all over one float32 for the matrix, which layers
with the same input share; inputs are rounded alike, over a float32 that calibration finds. ``mxfp4``: a power of two
for 32 numbers, stored as its exponent plus 127; inputs stay in 16 bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ftcli.export.compressed import write_compressed
from ftcli.export.scheme import Calibration, Given, Parts, Scheme, by_rows, farther, group_of, is_scale
from ftcli.plain import JsonObject

#: The largest number of float8_e4m3fn, and its smallest step.
LARGEST, SMALLEST = 448.0, 2.0**-9
#: Largest error of a weight: half a unit of three bits, or half the smallest step times the scale.
_ROUNDING = 2.0**-4
#: The four-bit floats, and where the next one is nearer; half-way goes to the even one.
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NVFP4_GROUP, _MXFP4_GROUP = 16, 32
#: Multiples of the scale by which a group's largest number is 6 that are tried; with 1.5 it is 4.
_MULTIPLES = (1.0, 0.85, 1.25, 1.5)
_BIAS = 127
_NUMBERS: JsonObject = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None,
}  # fmt: skip


def scale_of(weight: Tensor) -> Tensor:
    """The scale (O, 1) float32 of each row of ``weight`` (O, I); 1 where a row is zero."""
    wanted = weight.abs().amax(1, keepdim=True) / LARGEST
    held = wanted.to(torch.bfloat16).float()
    above = torch.tensor(torch.inf, dtype=torch.bfloat16, device=weight.device)
    up = torch.nextafter(held.to(torch.bfloat16), above).float()
    return torch.where(wanted == 0, 1.0, torch.where(held < wanted, up, held))


def to_float8(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight`` (O, I) float32 over its scale, in float8_e4m3fn."""
    return (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _encoded(weight: Tensor, given: Given | None, static: bool) -> Parts:
    scale = scale_of(weight)
    inputs = {"input_scale": _one(_largest(given) / LARGEST)} if static else {}
    return {"weight": to_float8(weight, scale), "weight_scale": scale, **inputs}


def _largest(given: Given | None) -> float:
    """The largest input that calibration saw; 1 where it saw zeros alone."""
    return (given.largest if given is not None else 0.0) or 1.0


def _one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


def _unlike(parts: Parts, wanted: Tensor, given: Given | None, static: bool) -> str | None:
    scale, largest = parts["weight_scale"], wanted.abs().amax(1, keepdim=True)
    if not is_scale(scale):
        return "has a scale that is not a positive number"
    if bool(((scale * LARGEST > 1.02 * largest) & (largest > 0)).any()):
        return "has a scale that wastes the type's range"
    if static and not torch.equal(parts["input_scale"], _one(_largest(given) / LARGEST)):
        return "has a scale of its inputs that is not that of the calibration rows"
    again = parts["weight"].float() * scale
    # As much again for the order of sums in merging, which moves what lies half-way between two values.
    room = _ROUNDING * wanted.abs() + SMALLEST / 2 * scale + 1e-6 * largest
    if not bool(((again - wanted).abs() <= room).all()):
        return f"differs by up to {float((again - wanted).abs().max()):.3g} from what was trained"
    return None


def fp8(*, static: bool) -> Scheme:
    """With inputs rounded by token, or ``static``: by what calibration has seen."""
    inputs = {"strategy": "tensor", "dynamic": False} if static else {"strategy": "token", "dynamic": True}
    observer = "static_minmax" if static else None

    def parts(shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        told = {"input_scale": ((1,), torch.float32)} if static else {}
        return {"weight": (shape, torch.float8_e4m3fn), "weight_scale": ((shape[0], 1), torch.float32), **told}

    return Scheme(
        bits=8,
        layout="float-quantized",
        numbers={
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": {**_NUMBERS, **inputs, "observer": observer},
        },
        parts=parts,
        encode=partial(_encoded, static=static),
        decode=lambda parts: parts["weight"].float() * parts["weight_scale"],
        unlike=partial(_unlike, static=static),
        tolerance=0.5,  # inputs rounded: 0.07 to 0.23 measured on small random models
        calibration=Calibration() if static else None,
    )


def _nibbles(numbers: Tensor) -> Tensor:
    """Numbers (O, I), over their scales, as the nearest four-bit floats: uint8 (O, I / 2)."""
    edges = torch.tensor(_BETWEEN, device=numbers.device)
    down = torch.nextafter(edges, torch.zeros_like(edges))
    even = torch.arange(len(_BETWEEN), device=numbers.device) % 2 == 0  # the lower neighbour is the even one
    index = torch.bucketize(numbers.abs().contiguous(), torch.where(even, edges, down))
    codes = (index | (torch.signbit(numbers).long() << 3)).to(torch.uint8).unflatten(-1, (-1, 2))
    packed: Tensor = codes[..., 0] | (codes[..., 1] << 4)
    return packed


def _numbers_of(packed: Tensor) -> Tensor:
    """The inverse, in float32."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    values = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)], device=packed.device)
    return values[codes]


def _times(numbers: Tensor, scale: Tensor) -> Tensor:
    """``numbers`` (O, I) by the scale (O, groups) of each group."""
    weight: Tensor = (numbers.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
    return weight


def nvfp4(widths: frozenset[int]) -> Scheme:
    """Raises FtcliError FT740 where rows are no multiple of 16."""
    group_of(widths, (_NVFP4_GROUP,))
    common: JsonObject = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": _NVFP4_GROUP, "strategy": "tensor_group",
        "block_structure": None, "scale_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    return Scheme(
        bits=4,
        layout="nvfp4-pack-quantized",
        numbers={
            "weights": {**common, "dynamic": False, "observer": "minmax"},
            "input_activations": {**common, "dynamic": "local", "observer": "static_minmax"},
        },
        parts=lambda shape: {
            "weight_packed": ((shape[0], shape[1] // 2), torch.uint8),
            "weight_scale": ((shape[0], shape[1] // _NVFP4_GROUP), torch.float8_e4m3fn),
            "weight_global_scale": ((1,), torch.float32),
            "input_global_scale": ((1,), torch.float32),
        },
        encode=_nvfp4_encoded,
        decode=_nvfp4_decoded,
        unlike=_nvfp4_unlike,
        tolerance=0.5,
        calibration=Calibration(),
    )


def _nvfp4_encoded(weight: Tensor, given: Given | None) -> Parts:
    peak = (given.peak if given is not None else float(weight.abs().max())) or 1.0
    whole = LARGEST * _FOUR_BITS[-1] / peak

    def rounded(rows: Tensor) -> tuple[Tensor, ...]:
        groups = rows.unflatten(1, (-1, _NVFP4_GROUP))
        largest = groups.abs().amax(-1, keepdim=True) / _FOUR_BITS[-1] * whole
        best, scale = torch.full_like(largest, torch.inf), largest
        for multiple in _MULTIPLES:
            tried = (largest * multiple).clamp(SMALLEST, LARGEST).to(torch.float8_e4m3fn).float()
            unit = tried / whole
            error = (_numbers_of(_nibbles((groups / unit).flatten(1))).view_as(groups) * unit - groups).square()
            error = error.sum(-1, keepdim=True)
            scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
        return _nibbles((groups / (scale / whole)).flatten(1)), scale[..., 0].to(torch.float8_e4m3fn)

    packed, scale = by_rows(rounded, weight)
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_global_scale": _one(whole),
        "input_global_scale": _one(LARGEST * _FOUR_BITS[-1] / _largest(given)),
    }


def _nvfp4_decoded(parts: Parts) -> Tensor:
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].to(parts["weight_scale"].device)
    return _times(_numbers_of(parts["weight_packed"]), scale)


def _nvfp4_unlike(parts: Parts, wanted: Tensor, given: Given | None) -> str | None:
    best = _nvfp4_encoded(wanted, given)
    if not all(is_scale(parts[name]) for name in parts if name.endswith("scale")):
        return "has a scale that is not a positive number"
    if not torch.equal(parts["input_global_scale"], best["input_global_scale"]):
        return "has a scale of its inputs that is not that of the calibration rows"
    if farther(_nvfp4_decoded(parts), _nvfp4_decoded(best), wanted, _NVFP4_GROUP):
        return "lies farther from what was trained than four bits need"
    if not torch.allclose(parts["weight_global_scale"], best["weight_global_scale"], rtol=1e-3):
        return "has another global scale than the layers with the same input"
    return None


def mxfp4(widths: frozenset[int]) -> Scheme:
    """Raises FtcliError FT740 where rows are no multiple of 32."""
    group_of(widths, (_MXFP4_GROUP,))
    weights: JsonObject = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": _MXFP4_GROUP, "strategy": "group",
        "block_structure": None, "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax",
    }  # fmt: skip
    return Scheme(
        bits=4,
        layout="mxfp4-pack-quantized",
        numbers={"weights": weights, "input_activations": None},
        parts=lambda shape: {
            "weight_packed": ((shape[0], shape[1] // 2), torch.uint8),
            "weight_scale": ((shape[0], shape[1] // _MXFP4_GROUP), torch.uint8),
        },
        encode=lambda weight, _: _mxfp4_encoded(weight),
        decode=_mxfp4_decoded,
        unlike=_mxfp4_unlike,
        tolerance=0.5,
    )


def _mxfp4_encoded(weight: Tensor) -> Parts:
    packed, scale = by_rows(_mxfp4_rows, weight)
    return {"weight_packed": packed, "weight_scale": scale}


def _mxfp4_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of the two powers of two that cut the largest number least, or not at all, each group takes the better one."""
    groups = weight.unflatten(1, (-1, _MXFP4_GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    lower = (torch.where(largest > 0, largest, 1.0).log2().floor() - 2 + _BIAS).clamp(0, 253)
    numbers = [groups / torch.exp2(exponent - _BIAS) for exponent in (lower, lower + 1)]
    low, high = (_nibbles(each.flatten(1)) for each in numbers)
    errors = [
        (_numbers_of(packed).view_as(groups) - each).square().sum(-1, keepdim=True)
        for packed, each in zip((low, high), numbers, strict=True)
    ]
    better = 4 * errors[1] < errors[0]  # in units of the scale, which is twice as large
    high, low = (packed.unflatten(1, (-1, _MXFP4_GROUP // 2)) for packed in (high, low))
    return torch.where(better, high, low).flatten(1), (lower + better)[..., 0].to(torch.uint8)


def _mxfp4_decoded(parts: Parts) -> Tensor:
    scale = torch.exp2(parts["weight_scale"].float() - _BIAS)
    return _times(_numbers_of(parts["weight_packed"]), scale)


def _mxfp4_unlike(parts: Parts, wanted: Tensor, _: Given | None) -> str | None:
    best = _mxfp4_decoded(_mxfp4_encoded(wanted))
    if farther(_mxfp4_decoded(parts), best, wanted, _MXFP4_GROUP):
        return "lies farther from what was trained than four bits need"
    return None


write_fp8 = partial(write_compressed, scheme_of=lambda _: fp8(static=False))
write_fp8_static = partial(write_compressed, scheme_of=lambda _: fp8(static=True))
write_nvfp4 = partial(write_compressed, scheme_of=nvfp4)
write_mxfp4 = partial(write_compressed, scheme_of=mxfp4)
