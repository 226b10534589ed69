"""Weights of eight bits, llm-compressor's ``FP8_DYNAMIC``: float8_e4m3fn times a scale for each output channel.

Activations are rounded by token while the model is served. A scale (O, 1) is the row's largest number over 448, rounded
up to what bfloat16 holds: programs that keep it in bfloat16 and those that keep it in float32 compute with the same
number, and no weight ends beyond what the type holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ftcli.export.compressed import Scheme, write_compressed
from ftcli.export.source import ExportSource
from ftcli.export.verify import Verified
from ftcli.plain import JsonObject

#: The largest number of float8_e4m3fn, and its smallest step.
LARGEST, SMALLEST = 448.0, 2.0**-9
#: Largest error of a weight: half a unit of three bits, or half the smallest step times the scale.
_ROUNDING = 2.0**-4
_NUMBERS: JsonObject = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None,
}  # fmt: skip


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """As :func:`ftcli.export.compressed.write_compressed`."""
    return write_compressed(source, folder, say, lambda _: FP8)


def scale_of(weight: Tensor) -> Tensor:
    """The scale (O, 1) float32 of each row of ``weight`` (O, I); 1 where a row is zero."""
    wanted = weight.abs().amax(1, keepdim=True) / LARGEST
    held = wanted.to(torch.bfloat16).float()
    up = torch.nextafter(held.to(torch.bfloat16), torch.tensor(torch.inf, dtype=torch.bfloat16)).float()
    return torch.where(wanted == 0, 1.0, torch.where(held < wanted, up, held))


def to_float8(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight`` (O, I) float32 over its scale, in float8_e4m3fn."""
    return (weight / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _encoded(weight: Tensor) -> dict[str, Tensor]:
    scale = scale_of(weight)
    return {"": to_float8(weight, scale), "_scale": scale}


def _unlike(parts: Mapping[str, Tensor], wanted: Tensor) -> str | None:
    scale, largest = parts["_scale"], wanted.abs().amax(1, keepdim=True)
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        return "has a scale that is not a positive number"
    if bool(((scale * LARGEST > 1.02 * largest) & (largest > 0)).any()):
        return "has a scale that wastes the type's range"
    again = parts[""].float() * scale
    # As much again for the order of sums in merging, which moves what lies half-way between two values.
    room = _ROUNDING * wanted.abs() + SMALLEST / 2 * scale + 1e-6 * largest
    if not bool(((again - wanted).abs() <= room).all()):
        return f"differs by up to {float((again - wanted).abs().max()):.3g} from what was trained"
    return None


FP8 = Scheme(
    bits=8,
    layout="float-quantized",
    numbers={
        "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True, "observer": None},
    },
    parts=lambda shape: {"": (shape, torch.float8_e4m3fn), "_scale": ((shape[0], 1), torch.float32)},
    encode=_encoded,
    unlike=_unlike,
    tolerance=0.5,  # activations rounded: 0.07 to 0.23 measured on small random models
)
