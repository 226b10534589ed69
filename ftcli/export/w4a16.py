"""Weights of four bits, llm-compressor's ``W4A16``: integers from -8 to 7 times a scale for each group of a row.

Of a group w of numbers, q = round(w / s) within -8 and 7 stands for s · q, and s is that of a few multiples of
max|w| / 7 in bfloat16 which leaves the least |w - s · q|²: a smaller scale cuts the largest number, and is finer for
all others. Nothing is calibrated: it depends on the weights alone. Eight integers are an int32, the first in its
lowest bits, each plus 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ftcli.errors import FtcliError
from ftcli.export.compressed import Scheme, write_compressed
from ftcli.export.source import ExportSource
from ftcli.export.verify import Verified

#: Numbers of a group, by preference: vLLM's kernels take all three.
GROUPS = (128, 64, 32)
#: Multiples of the largest number's scale that are tried.
_MULTIPLES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
_LEAST, _MOST = -8, 7
#: A group may lie so much farther from its weights than the best scale makes it: merging sums in another order.
_ROOM = 1.05


def write(source: ExportSource, folder: Path, say: Callable[[str], None]) -> Verified:
    """As :func:`ftcli.export.compressed.write_compressed`."""
    return write_compressed(source, folder, say, scheme_of)


def scheme_of(widths: frozenset[int]) -> Scheme:
    """The scheme with the largest group that divides all rows. Raises FtcliError FT740 where none does."""
    group = next((size for size in GROUPS if not any(width % size for width in widths)), None)
    if group is None:
        odd = next(width for width in sorted(widths) if width % GROUPS[-1])
        message = f"rows of {odd} numbers are no multiple of {GROUPS[-1]}, which 4-bit groups need"
        raise FtcliError.single("FT740", message, help="use export.formats: [fp8]")
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "group_size": group, "strategy": "group",
        "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
    }  # fmt: skip
    return Scheme(
        bits=4,
        layout="pack-quantized",
        numbers={"weights": weights, "input_activations": None},
        parts=lambda shape: {
            "_packed": ((shape[0], shape[1] // 8), torch.int32),
            "_scale": ((shape[0], shape[1] // group), torch.bfloat16),
            "_shape": ((2,), torch.int64),
        },
        encode=partial(encoded, group=group),
        unlike=partial(_unlike, group=group),
        tolerance=0.5,  # 0.19 to 0.30 measured on small random models, groups of 32 and 64
    )


def encoded(weight: Tensor, group: int) -> dict[str, Tensor]:
    """The parts of ``weight`` (O, I) float32: ``_packed`` (O, I / 8), ``_scale`` (O, I / group) and ``_shape``."""
    groups = weight.unflatten(1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    best = torch.full_like(largest, torch.inf)
    scale = torch.ones_like(largest)
    for multiple in _MULTIPLES:
        tried = (largest * multiple / _MOST).to(torch.bfloat16).float()
        tried = torch.where(tried > 0, tried, 1.0)
        error = (groups - tried * _integers(groups, tried)).square().sum(-1, keepdim=True)
        scale, best = torch.where(error < best, tried, scale), torch.minimum(error, best)
    codes = (_integers(groups, scale).flatten(1).to(torch.int64) - _LEAST).unflatten(1, (-1, 8))
    packed = (codes << torch.arange(0, 32, 4)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"_packed": packed.to(torch.int32), "_scale": scale[..., 0].to(torch.bfloat16), "_shape": shape}


def decoded(parts: Mapping[str, Tensor]) -> Tensor:
    """The weight (O, I) float32 that the parts stand for."""
    codes = (parts["_packed"].to(torch.int64)[..., None] >> torch.arange(0, 32, 4)) & 15
    groups = (codes.flatten(1) + _LEAST).float().unflatten(1, (parts["_scale"].shape[1], -1))
    weight: Tensor = (groups * parts["_scale"].float()[..., None]).flatten(1)
    return weight


def _integers(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).round().clamp(_LEAST, _MOST)


def _unlike(parts: Mapping[str, Tensor], wanted: Tensor, group: int) -> str | None:
    scale = parts["_scale"]
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        return "has a scale that is not a positive number"
    if parts["_shape"].tolist() != list(wanted.shape):
        return f"says that its shape is {parts['_shape'].tolist()}"
    found, best = (
        (each - wanted).unflatten(1, (-1, group)).square().sum(-1)
        for each in (decoded(parts), decoded(encoded(wanted, group)))
    )
    if not bool((found <= _ROOM * best + 1e-9 * wanted.square().mean()).all()):
        return "lies farther from what was trained than four bits need"
    return None
