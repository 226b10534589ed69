"""Schemes: how the weights of linear layers are stored in a few bits, and what calibration is to find out for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ftcli.errors import FtcliError
from ftcli.plain import JsonObject

#: A layer's tensors by their names in it: ``weight_packed``, ``weight_scale``, ``input_scale``.
Parts = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Given:
    """Statistics of a linear layer's input x (I,), from calibration.

    Attributes:
        largest: The largest ``|x|``.
        peak: The largest number of the weights of all layers with that input.
        products: The mean of ``x xᵀ`` (I, I) in float32; None where a scheme does not ask for it.
    """

    largest: float
    peak: float
    products: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Smoothing:
    """A search for factors s (I,): ``W diag(s)`` is rounded, and the input comes divided by s.

    Attributes:
        statistic: The number of each feature by which s is made: its mean or its largest absolute value.
        weights: A weight (O, I) as rounding makes it, quickly.
        inputs: Inputs (tokens, I) as they are rounded; None where they are not.
    """

    statistic: Literal["mean", "largest"]
    weights: Callable[[Tensor], Tensor]
    inputs: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The statistics that a scheme needs of the run's rows.

    Attributes:
        products: The scheme needs :attr:`Given.products`.
        smoothing: Factors are looked for.
    """

    products: bool = False
    smoothing: Smoothing | None = None


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight (O, I) is stored.

    Attributes:
        layout: compressed-tensors' name of how numbers are stored, and its description of them.
        parts: Shape and dtype of each tensor, for a weight's shape.
        encode: A weight in float32 as these tensors. Of a scheme that is calibrated with what was given to it; without,
            as rounding alone makes it, where it can.
        decode: The weight that they stand for, in float32.
        unlike: What is wrong with tensors of these shapes for a weight; None: nothing.
        tolerance: Largest relative error of the logits.
        calibration: None: it depends on the weights alone.
    """

    bits: int
    layout: str
    numbers: JsonObject
    parts: Callable[[tuple[int, ...]], Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
    encode: Callable[[Tensor, Given | None], Parts]
    decode: Callable[[Parts], Tensor]
    unlike: Callable[[Parts, Tensor, Given | None], str | None]
    tolerance: float
    calibration: Calibration | None = None


#: The scheme of a model, by the lengths of its linear layers' rows. Raises FtcliError FT740 where none fits.
SchemeOf = Callable[[frozenset[int]], Scheme]


def group_of(widths: frozenset[int], sizes: tuple[int, ...]) -> int:
    """The first of ``sizes`` that divides all rows. Raises FtcliError FT740 where none does."""
    for size in sizes:
        if not any(width % size for width in widths):
            return size
    odd = next(width for width in sorted(widths) if width % sizes[-1])
    message = f"rows of {odd} numbers are no multiple of {sizes[-1]}, which 4-bit groups need"
    raise FtcliError.single("FT740", message, help="use export.formats: [fp8]")


def is_scale(scale: Tensor) -> bool:
    """True if all are finite and positive."""
    return bool((torch.isfinite(scale.float()) & (scale.float() > 0)).all())


#: A group may lie so much farther from its weights than the best scale makes it: merging sums in another order.
ROOM = 1.05
#: Numbers that are rounded at once.
_AT_ONCE = 1 << 18


def farther(found: Tensor, best: Tensor, wanted: Tensor, group: int, room: float = ROOM) -> bool:
    """True if a group of ``found`` lies farther from ``wanted`` (O, I) than that of ``best`` does, beyond ``room``."""
    one, other = ((each - wanted).unflatten(1, (-1, group)).square().sum(-1) for each in (found, best))
    return not bool((one <= room * other + 1e-9 * wanted.square().mean()).all())


def by_rows(made: Callable[[Tensor], tuple[Tensor, ...]], weight: Tensor) -> tuple[Tensor, ...]:
    """Applies ``made`` to ``weight`` (O, ...), a few rows at a time, which caches hold: each (O, ...)."""
    rows = weight.split(max(1, _AT_ONCE // weight[0].numel()))
    return tuple(torch.cat(parts) for parts in zip(*map(made, rows), strict=True))
