"""Frozen weights in e4m3, multiplied as they are stored, and rows quantized for the products.

Legend: M rows, I input and O output features; e4m3 has 3 bits of significand and a largest value of 448.

    q_i = round(x_i / s)     s = the smallest power of two with max|x_i| / s <= 448; 1 for a row of zeros

Scales that are powers of two cost no accuracy, since e4m3 is a floating format: its relative error is the same in every
binade. Dividing by them is exact, so quantized values are the same on every machine, and ``s * q`` is exact in
bfloat16. Weights have one scale for each output feature, activations and their gradients one for each token:

    y  = x Wᵀ = s_x ∘ (q_x q_Wᵀ) ∘ s_W          both scales are outside the sum over I
    dx = dy W = s_d ∘ (q_d q_V)  ∘ s_V          V = Wᵀ, so that both scales are outside the sum over O

Hopper's fp8 instructions want both operands contiguous along the sum, so W is stored as (O, I) and as (I, O). The
second copy has one scale for each input feature. It is made from the first copy, not from the original weight: since
powers of two leave significands as they are, both stand for the same matrix, and the gradient is that of the function
which the forward computed. Only values more than 2^15 times below the largest of their row lose bits.

e4m3 has no infinity: numbers that are not finite become NaN, which spreads as in any other product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ftkernels.device import BackendName, choose_backend, dtype_name, gpu_of
from ftkernels.fp8_kernels import E4M3, dequantize_fp8_triton, quantize_fp8_torch, quantize_fp8_triton
from ftkernels.fp8_trial import why_no_rows_here
from ftkernels.limits import why_no_fp8

# cuBLAS and CUTLASS want rows of fp8 operands to start at multiples of 16 bytes.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """A matrix (M, N) quantized by rows: ``data`` (M, N) e4m3, ``scale`` (M,) float32 powers of two. As a weight, an
    ``ftkernels.projection.FrozenWeight``.
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """(M, N)."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def stored_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(M, N) in ``dtype``: exact in bfloat16, float32 and float64."""
        if dtype != torch.float64 and self.data.is_contiguous() and why_no_fp8(gpu_of(self.device), "bfloat16") is None:
            return dequantize_fp8_triton(self.data, self.scale, dtype)
        wide = torch.float32 if dtype == torch.float16 else dtype
        return _widened(self.data, wide).mul_(self.scale[:, None].to(wide)).to(dtype)


def _widened(data: Tensor, dtype: torch.dtype) -> Tensor:
    """``data`` (M, N) e4m3 in ``dtype``, exactly; on a CPU, where torch converts value by value, out of a table of the
    256 that there are, 3 to 8 times as fast.
    """
    if data.device.type != "cpu":
        return data.to(dtype)
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)
    return values.index_select(0, data.view(torch.uint8).reshape(-1).int()).view(data.shape)


def quantize_fp8(x: Tensor, backend: BackendName = "auto") -> Fp8Rows:
    """``x`` (M, N) quantized by rows; one launch on a GPU.

    Raises:
        ValueError: not a floating matrix.
    """
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"expected a floating matrix, got {x.dtype} {tuple(x.shape)}")
    quantize = quantize_fp8_triton if choose_backend(x.device, backend).is_triton else quantize_fp8_torch
    return Fp8Rows(*quantize(x))


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A frozen weight (O, I) in e4m3: an ``ftkernels.projection.MultiplyingWeight``.

    data: (O, I) and scale: (O,) float32; transposed: (I, O) and transposed_scale: (I,) float32, the same matrix.

    Raises:
        ValueError: at construction, for parts that do not make one weight.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor

    def __post_init__(self) -> None:
        parts = (self.data, self.scale, self.transposed, self.transposed_scale)
        problem = None
        if [p.dtype for p in parts] != [E4M3, torch.float32] * 2:
            problem = "e4m3 with float32 scales"
        elif self.data.dim() != 2 or self.transposed.shape != self.data.t().shape:
            problem = "a matrix and its transpose"
        elif self.scale.shape != self.data.shape[:1] or self.transposed_scale.shape != self.data.shape[1:]:
            problem = "values with one scale a row"
        elif len({p.device for p in parts}) > 1:
            problem = "on one device"
        if problem is not None:
            found = ", ".join(f"{dtype_name(p.dtype)} {tuple(p.shape)} on {p.device}" for p in parts)
            raise ValueError(f"an fp8 weight is {problem}, got {found}")

    @property
    def shape(self) -> torch.Size:
        """(O, I)."""
        return self.data.shape

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The (O, I) matrix in ``dtype``: exact in bfloat16, float32 and float64."""
        return Fp8Rows(self.data, self.scale).dequantize(dtype)

    def product(self, x: Tensor) -> Tensor:
        """``x @ W.T`` with x quantized by rows: (M, I) -> (M, O), in x's dtype."""
        return self.product_of_rows(quantize_fp8(x), x.dtype)

    def product_of_rows(self, rows: Fp8Rows, dtype: torch.dtype) -> Tensor:
        """``x @ W.T`` of rows that are quantized already: (M, I) -> (M, O), in ``dtype``."""
        return multiply_rows(rows, Fp8Rows(self.data, self.scale), dtype)

    def product_back(self, dy: Tensor) -> Tensor:
        """``dy @ W`` with dy quantized by rows: (M, O) -> (M, I), in dy's dtype."""
        return multiply_rows(quantize_fp8(dy), Fp8Rows(self.transposed, self.transposed_scale), dy.dtype)


def quantize_weight(weight: Tensor) -> Fp8Weight:
    """A floating matrix (O, I) as an ``Fp8Weight`` on its device.

    Raises:
        ValueError: not a floating matrix, or numbers that are not finite.
    """
    return _with_transpose(quantize_rows(weight))


def quantize_rows(weight: Tensor) -> Fp8Rows:
    """A floating matrix (O, I) by rows, for products that dequantize it.

    Raises:
        ValueError: as :func:`quantize_weight`.
    """
    rows = quantize_fp8(weight.detach())
    if bool(((rows.data.view(torch.uint8) & 0x7F) == 0x7F).any()):  # NaN, by its bits
        raise ValueError("the weight holds numbers that are not finite")
    return rows


def _with_transpose(rows: Fp8Rows) -> Fp8Weight:
    # bfloat16 holds every value times its scale exactly, in half the memory of float32.
    back = quantize_fp8(rows.dequantize(torch.bfloat16).t().contiguous())
    return Fp8Weight(rows.data, rows.scale, back.data, back.scale)


def join_fp8(weights: Sequence[Fp8Weight]) -> list[Fp8Weight]:
    """Weights of one input, now views of new memory in which they are neighbours (``joined_fp8``).

    The transposed copies get scales that all share.
    """
    data = torch.cat([w.data.view(torch.uint8) for w in weights]).view(E4M3)
    joint = _with_transpose(Fp8Rows(data, torch.cat([w.scale for w in weights])))
    sizes = [int(w.shape[0]) for w in weights]
    parts = zip(joint.data.split(sizes), joint.scale.split(sizes), joint.transposed.split(sizes, dim=1), strict=True)
    return [Fp8Weight(*part, joint.transposed_scale) for part in parts]


def part_fp8(weight: Fp8Weight) -> Fp8Weight:
    """The weight in memory of its own, as it was before ``join_fp8``, to the bit."""
    return _with_transpose(Fp8Rows(weight.data.clone(), weight.scale.clone()))


def joined_fp8(weights: Sequence[object]) -> Fp8Weight | None:
    """The one weight whose parts these are (``join_fp8``), without a copy; a single weight itself; else None."""
    first = weights[0]
    if not isinstance(first, Fp8Weight) or len(weights) == 1:
        return first if isinstance(first, Fp8Weight) else None
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
        first.transposed_scale,
    )


def _follows(first: Fp8Weight, weight: Fp8Weight, rows: int) -> bool:
    """True when ``weight``'s parts lie ``rows`` output features behind ``first``'s, in the same memory."""
    if not weight.data.is_contiguous() or weight.transposed.stride() != first.transposed.stride():
        return False
    pairs = (
        (first.data, weight.data, rows * first.shape[1]),
        (first.scale, weight.scale, rows),
        (first.transposed, weight.transposed, rows),
        (first.transposed_scale, weight.transposed_scale, 0),
    )
    return all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and b.storage_offset() - a.storage_offset() == distance
        for a, b, distance in pairs
    )


def multiply_rows(a: Fp8Rows, b: Fp8Rows, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``: (M, K), (N, K) -> (M, N) in ``dtype``, with both scales.

    On tensor cores where ``fp8_on_tensor_cores`` says so; elsewhere the same quantized numbers multiplied in ``dtype``.
    """
    if not fp8_on_tensor_cores(a.data, b.data, dtype):
        return torch.mm(a.dequantize(dtype), b.dequantize(dtype).t())
    # Fast accumulation (14 bits on Hopper) is 2.4e-3 to 4.9e-3 off, where quantizing itself is 3.8e-2 off, and takes
    # 6 to 20% less time.
    return torch._scaled_mm(
        a.data, b.data.t(), scale_a=a.scale[:, None], scale_b=b.scale[None, :], out_dtype=dtype, use_fast_accum=True
    )


def fp8_on_tensor_cores(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """True when the fp8 instructions serve this product: by ``limits.why_no_fp8``, by the machine's trial
    (``fp8_trial``), and by the alignment of the rows.
    """
    gpu = gpu_of(a.device)
    if a.shape[0] == 0 or why_no_fp8(gpu, dtype_name(dtype)) is not None:
        return False
    if gpu.capability is None or why_no_rows_here(gpu.capability) is not None:
        return False
    return a.shape[1] % _ALIGNED == 0 and b.shape[0] % _ALIGNED == 0 and b.stride(0) % _ALIGNED == 0
