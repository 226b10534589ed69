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

The kernel that rounds reads the masters twice and writes a byte for each; in plain torch it would be ten times that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import interpreting, on_device_of, rounded, store_dtype

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


# Parts whose sums are added up in float64 (few in the interpreter, where programs cost a millisecond), and elements
# that a program takes at a time.
_PARTS, _INTERPRETED_PARTS = 1024, 4
_BLOCK = 4096
_SMALLEST = tl.constexpr(SMALLEST)
# As in ftkernels.bitlinear: rounds to the nearest whole number, halves to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _sum_kernel(w_ptr, part_ptr, count, BLOCK: tl.constexpr):
    """A part of the sum of |w|, in float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.abs(tl.load(w_ptr + at, mask=at < count, other=0.0).to(tl.float32)).to(tl.float64)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _round_kernel(w_ptr, part_ptr, t_ptr, scale_ptr, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    mean = (tl.sum(tl.load(part_ptr + tl.arange(0, PARTS)), axis=0) / count).to(tl.float32)
    scale = tl.where(mean < _SMALLEST, _SMALLEST, mean)  # which leaves NaN as it is
    inverse = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.full((1,), 0.0, tl.float32) + scale)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    for first in range(start, count, tl.num_programs(0).to(tl.int64) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + at, mask=at < count, other=0.0).to(tl.float32)
        near = tl.minimum(tl.maximum(w * inverse, -1.0), 1.0)
        tl.store(t_ptr + at, ((near + _ROUNDING) - _ROUNDING).to(tl.int8), mask=at < count)


@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, scale_stride, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    q = tl.load(q_ptr + row * N + at, mask=at < N, other=0)
    out = q.to(tl.float32) * tl.load(scale_ptr + row * scale_stride)
    tl.store(out_ptr + row * N + at, out.to(out_ptr.dtype.element_ty), mask=at < N)


def ternarise_triton(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``ternary.ternarise`` of ``weight`` (O, I), of at least one element: (values (O, I) int8, scale () float32)."""
    weight = weight.detach().contiguous()
    programs = _INTERPRETED_PARTS if interpreting() else _PARTS
    parts = torch.empty(programs, dtype=torch.float64, device=weight.device)
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty((), dtype=torch.float32, device=weight.device)
    count = weight.numel()
    with on_device_of(weight):
        _sum_kernel[(programs,)](weight, parts, count, BLOCK=_BLOCK, num_warps=8)
        _round_kernel[(min(triton.cdiv(count, _BLOCK), 2 * programs),)](
            weight, parts, values, scale, count, PARTS=programs, BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False
        )
    return values, scale


def dequantize_int8_triton(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` (M, N) int8, contiguous, times ``scale``, one a row (M,) or one in all (): (M, N), rounded once."""
    out = torch.empty(values.shape, dtype=store_dtype(dtype), device=values.device)
    count, width = values.shape
    if count and width:
        block = min(triton.next_power_of_2(width), 2048)
        with on_device_of(values):
            _dequantize_kernel[(count, triton.cdiv(width, block))](
                values, scale, scale.stride(0) if scale.dim() else 0, out, width, BLOCK=block
            )
    return rounded(out, dtype)
