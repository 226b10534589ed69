"""Weights of three values and activations of eight bits, as BitNet b1.58 has them: values, scales and packed bytes.

    weights       s = max(mean |W|, 1e-5), one scale a matrix           t = clip(round(W / s), -1, 1)
    activations   a = max(max |x|, 1e-5), one scale a token             q = clip(round(127 x / a), -128, 127)

The Era of 1-bit LLMs (arXiv 2402.17764), equations 1 to 3; activations as in the authors' "Training Tips, Code and FAQ"
of 2024, by token and to both sides. Rounding is to the nearest, halves to even. W / s is taken as W times 1 / s and
127 x / a as x times 127 / a, as transformers does. mean |W| is summed in float64: a matrix has the same values on every
device.

Masters of ternary weights: absmean of s t is s times the density of t (the share of its values that are not zero), so
a checkpoint of s and t is trained on from W = s t / density, which gives back t and s to the last bit (``remaster``).

Packed (transformers' ``bitnet``): four values a byte, as t + 1. Bits 2i and 2i + 1 of packed row r are row
i * O / 4 + r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Smallest scale of a matrix and of a token.
SMALLEST = 1e-5
#: Values in a packed byte.
PER_BYTE = 4


@dataclass(frozen=True, slots=True)
class Ternary:
    """A matrix of -1, 0 and 1, ``data`` (O, I) int8, times ``scale``, a float32 number ().

    Raises:
        ValueError: dtypes or shapes that are not these.
    """

    data: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        if self.data.dtype != torch.int8 or self.data.dim() != 2:
            raise ValueError(f"ternary values are int8 (O, I), not {self.data.dtype} {tuple(self.data.shape)}")
        if self.scale.dtype != torch.float32 or self.scale.dim():
            raise ValueError(
                f"a ternary matrix has one float32 scale, not {self.scale.dtype} {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """s t, (O, I) in ``dtype``."""
        return self.data.to(dtype).mul_(self.scale)


def ternarise(weight: Tensor) -> Ternary:
    """``weight`` (O, I), floating and finite, as the formulas say; on its device, without autograd."""
    wide = weight.detach().float()
    absmean = torch.linalg.vector_norm(wide, 1, dtype=torch.float64) / max(wide.numel(), 1)
    scale = absmean.float().clamp(min=SMALLEST)
    return Ternary((wide * (1.0 / scale)).round_().clamp_(-1, 1).to(torch.int8), scale)


def quantize_int8_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q (M, N) int8, step (M,) float32) of x (M, N) floating: q times its row's step stands for x."""
    wide = x.detach().float()
    if not x.shape[1]:
        return wide.to(torch.int8), wide.new_full((x.shape[0],), SMALLEST / 127)
    absmax = wide.abs().amax(1).clamp(min=SMALLEST)
    # A number divided by a tensor, or a tensor by a number, is a product with the rounded reciprocal (on a GPU both).
    most = torch.full_like(absmax, 127.0)
    q = (wide * (most / absmax)[:, None]).round_().clamp_(-128, 127)
    return q.to(torch.int8), absmax / most


def remaster(ternary: Tensor, scale: float) -> Tensor:
    """Float32 masters (O, I) whose ``ternarise`` is ``ternary`` (O, I), and ``scale`` to the last bit of float32.

    Where no single magnitude gives exactly this mean, some of the values are the next larger number. A matrix of
    zeros has no masters with a scale of their own: its scale becomes the smallest.

    Raises:
        ValueError: ``scale`` is below the smallest that a matrix can have.
    """
    if scale < SMALLEST:
        raise ValueError(f"a scale of {scale} is below {SMALLEST}, the smallest that masters can have")
    count, elements = int(torch.count_nonzero(ternary)), ternary.numel()
    if not count:
        return torch.zeros(ternary.shape, dtype=torch.float32, device=ternary.device)
    target = float(torch.tensor(scale, dtype=torch.float32))
    sum_wanted = target * elements
    below = torch.tensor(sum_wanted / count, dtype=torch.float32)
    if float(below) * count > sum_wanted:
        below = torch.nextafter(below, torch.zeros(()))
    above = torch.nextafter(below, torch.tensor(torch.inf))
    larger = min(count, round((sum_wanted - float(below) * count) / (float(above) - float(below))))
    masters = ternary.float() * float(below)
    if larger:
        at = ternary.reshape(-1).nonzero()[:larger, 0]
        masters.view(-1)[at] = ternary.reshape(-1)[at].float() * float(above)
    return masters


def pack_ternary(ternary: Tensor) -> Tensor:
    """(O / 4, I) uint8 of ``ternary`` (O, I), O a multiple of 4.

    Raises:
        ValueError: O is no multiple of 4.
    """
    if ternary.shape[0] % PER_BYTE:
        raise ValueError(f"{ternary.shape[0]} rows cannot be packed four to a byte")
    parts = (ternary + 1).to(torch.uint8).chunk(PER_BYTE, 0)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << (2 * i)
    return packed


def unpack_ternary(packed: Tensor) -> Tensor:
    """(4 O', I) int8 of ``packed`` (O', I) uint8.

    Raises:
        ValueError: it is not uint8, or holds the pair of bits that stands for no value.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ValueError(f"packed ternary values are uint8 (O / 4, I), not {packed.dtype} {tuple(packed.shape)}")
    values = torch.cat([(packed >> (2 * i)) & 3 for i in range(PER_BYTE)], dim=0)
    if bool((values == 3).any()):
        raise ValueError("its bytes hold a pair of bits that stands for no ternary value")
    return values.to(torch.int8) - 1
