"""Frozen weights in e4m3, multiplied as they are stored, and rows quantised for the products.

Legend: M rows, I input and O output features; e4m3 has 3 bits of significand and a largest value of 448.

    q_i = round(x_i / s_i)   s_i = the smallest power of two with max|x_i| / s_i <= 448; 1 for a row of zeros

A power of two loses nothing: e4m3 is a floating format, its relative error is the same in every binade. In return
dividing is exact, so quantised values and their products by hand are the same on every machine, and ``s * q`` is exact
in bfloat16. Weights have one scale an output feature, activations one a token:

    y  = x Wᵀ  =  s_x ∘ (q_x q_Wᵀ) ∘ s_W          both scales are outside the sum over I
    dx = dy W  =  s_d ∘ (q_d q_W)                 q_d, s_d are those of dy ∘ s_W: here the weight's scale is inside
                                                  the sum, and dy takes it along, exactly, before it is quantised

So both products read the same quantised weight, and the gradient is that of the function that the forward computed.
Hopper's fp8 instructions want both operands contiguous along the sum: the weight is stored twice, (O, I) and (I, O).

Not finite numbers become NaN, which spreads as in any other product; e4m3 has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ftkernels.device import choose_backend
from ftkernels.fp8_kernels import E4M3, WIDEST_ROW, quantize_rows_torch, quantize_rows_triton

# cuBLAS and CUTLASS want rows of fp8 operands to start at multiples of 16 bytes.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix (M, N) quantised by rows: ``data`` (M, N) e4m3, ``scale`` (M,) float32 powers of two."""

    data: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(M, N) in ``dtype``: exact in bfloat16, float32 and float64."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.data.to(wide) * self.scale[:, None].to(wide)).to(dtype)


def quantize_rows(x: Tensor, factor: Tensor | None = None) -> Fp8Rows:
    """``x`` (M, N), times ``factor`` (N,) float32 where given, quantised by rows. One launch on a GPU.

    Raises:
        ValueError: not a floating matrix, or a factor that does not fit it.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"expected a floating matrix, got {x.dtype} {tuple(x.shape)}")
    if factor is not None and factor.shape != x.shape[1:]:
        raise ValueError(f"factor {tuple(factor.shape)} does not fit {tuple(x.shape)}")
    kernel = choose_backend(x.device).is_triton and x.shape[1] <= WIDEST_ROW
    return Fp8Rows(*(quantize_rows_triton if kernel else quantize_rows_torch)(x, factor))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A frozen weight (O, I) in e4m3: an ``ftkernels.projection.MultiplyingWeight``.

    data: (O, I), contiguous rows; scale: (O,) float32; transposed: (I, O), the same numbers, contiguous rows.

    Raises:
        ValueError: at construction, for parts that do not make one weight.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor

    def __post_init__(self) -> None:
        parts = f"data {_shown(self.data)}, scale {_shown(self.scale)}, transposed {_shown(self.transposed)}"
        if self.data.dtype != E4M3 or self.transposed.dtype != E4M3 or self.scale.dtype != torch.float32:
            raise ValueError(f"an fp8 weight is e4m3 with float32 scales, got {parts}")
        if self.data.dim() != 2 or self.transposed.shape != self.data.t().shape:
            raise ValueError(f"an fp8 weight is a matrix and its transpose, got {parts}")
        if self.scale.shape != self.data.shape[:1]:
            raise ValueError(f"an fp8 weight has one scale a row, got {parts}")
        if not self.data.device == self.scale.device == self.transposed.device:
            devices = f"{self.data.device}, {self.scale.device}, {self.transposed.device}"
            raise ValueError(f"the parts of an fp8 weight {tuple(self.data.shape)} are on {devices}")

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The (O, I) matrix in ``dtype``: exact in bfloat16, float32 and float64."""
        return Fp8Rows(self.data, self.scale).dequantize(dtype)

    def product(self, x: Tensor) -> Tensor:
        """``x @ W.T`` with x quantised by rows: (M, I) -> (M, O), in x's dtype."""
        return self.product_of_rows(quantize_rows(x), x.dtype)

    def product_of_rows(self, rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
        """``x @ W.T`` of rows that are quantised already: (M, I) -> (M, O), in ``dtype``."""
        return _multiply(rows, Fp8Rows(self.data, self.scale), dtype)

    def product_back(self, dy: Tensor) -> Tensor:
        """``dy @ W`` with dy quantised by rows: (M, O) -> (M, I), in dy's dtype."""
        rows = quantize_rows(dy, self.scale)
        return _multiply(rows, Fp8Rows(self.transposed, _ones(self.shape[1], self.data.device)), dy.dtype)


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """A floating matrix (O, I) as an ``Fp8Weight`` on its device.

    Raises:
        ValueError: not a floating matrix, or numbers that are not finite.
    """
    rows = quantize_rows(weight.detach())
    if not bool(torch.isfinite(rows.data.float()).all()):
        raise ValueError("the weight holds numbers that are not finite")
    return Fp8Weight(rows.data, rows.scale, transpose(rows.data))


def transpose(data: Tensor) -> Tensor:
    """(O, I) bytes -> (I, O), contiguous."""
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def join_fp8(weights: Sequence[Fp8Weight]) -> Fp8Weight:
    """Weights of one input in new memory, one behind the other. ``split_fp8`` gives their parts, as views."""
    data = torch.cat([w.data.view(torch.uint8) for w in weights]).view(E4M3)
    transposed = torch.cat([w.transposed.view(torch.uint8) for w in weights], dim=1).view(E4M3)
    return Fp8Weight(data, torch.cat([w.scale for w in weights]), transposed)


def split_fp8(joint: Fp8Weight, rows: Sequence[int]) -> list[Fp8Weight]:
    """Views of ``joint``: ``rows[i]`` output features each."""
    sizes = list(rows)
    parts = zip(joint.data.split(sizes), joint.scale.split(sizes), joint.transposed.split(sizes, dim=1), strict=True)
    return [Fp8Weight(*part) for part in parts]


def joined_fp8(weights: Sequence[object]) -> Fp8Weight | None:
    """The one weight of which these are the parts (``split_fp8``), without a copy; None when there is none."""
    first = weights[0]
    if not isinstance(first, Fp8Weight):
        return None
    if len(weights) == 1:
        return first
    rows, features = 0, first.shape[1]
    for weight in weights:
        if not isinstance(weight, Fp8Weight) or not _follows(first, weight, rows):
            return None
        rows += weight.shape[0]
    if first.transposed.stride() != (rows, 1):
        return None
    return Fp8Weight(
        first.data.as_strided((rows, features), (features, 1)),
        first.scale.as_strided((rows,), (1,)),
        first.transposed.as_strided((features, rows), (rows, 1)),
    )


def _follows(first: Fp8Weight, weight: Fp8Weight, rows: int) -> bool:
    """Whether ``weight``'s parts lie ``rows`` output features behind ``first``'s, in the same memory."""
    if not weight.data.is_contiguous() or weight.transposed.stride() != first.transposed.stride():
        return False
    pairs = (
        (first.data, weight.data, rows * first.shape[1]),
        (first.scale, weight.scale, rows),
        (first.transposed, weight.transposed, rows),
    )
    return all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() - a.storage_offset() == distance
        for a, b, distance in pairs
    )


def _multiply(a: Fp8Rows, b: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``: (M, K), (N, K) -> (M, N) in ``dtype``, scales applied; summed in float32."""
    if _on_tensor_cores(a.data, b.data, dtype):
        return torch._scaled_mm(
            a.data,
            b.data.t(),
            scale_a=a.scale[:, None],
            scale_b=b.scale[None, :],
            out_dtype=dtype,
            use_fast_accum=True,
        )
    return torch.mm(a.dequantize(dtype), b.dequantize(dtype).t())


def _on_tensor_cores(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """fp8 instructions from capability 8.9; the product is written in bfloat16. Elsewhere the reference is taken: the
    same quantised numbers, multiplied in ``dtype``.
    """
    if not a.is_cuda or dtype != torch.bfloat16 or a.shape[0] == 0:
        return False
    fits = a.shape[1] % _ALIGNED == 0 and b.shape[0] % _ALIGNED == 0 and b.stride(0) % _ALIGNED == 0
    return fits and torch.cuda.get_device_capability(a.device) >= (8, 9)


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    """Scales of a matrix that has none; shared by all weights of this width."""
    return torch.ones(count, dtype=torch.float32, device=device)


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
