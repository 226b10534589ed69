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
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.device import (
    BackendName,
    choose_backend,
    dtype_name,
    gpu_of,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
)
from ftkernels.fp8_trial import why_no_rows_here
from ftkernels.limits import WIDEST_ROW, why_no_fp8

E4M3 = torch.float8_e4m3fn


@triton.jit
def _magnitude(x):
    """|x| where x is finite, else 0, so that a row with NaN in it still has a scale."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def _scale_of(absmax):
    """(scale, 1 / scale): the smallest power of two, of at least 2^-126, that brings ``absmax`` to at most 448; 1 for
    zero.
    """
    # 448 = 1.75 * 2^8: the sum carries into the exponent just where the significand is larger than 1.75.
    exponent = tl.maximum(((absmax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8, 1)
    exponent = tl.where(absmax == 0.0, 127, exponent)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def _scaled(x, inverse):
    """x divided by its row's scale. What is not finite becomes NaN: the cast to e4m3 would turn infinity into 448."""
    return tl.where(tl.abs(x) < float("inf"), x * inverse[:, None], float("nan"))


@triton.jit
def quantized_rows(x):
    """(x divided by its row's scale, the scales of the rows) for float32 x (rows, columns)."""
    scale, inverse = _scale_of(tl.max(_magnitude(x), axis=1))
    return _scaled(x, inverse), scale


@triton.jit
def _quantize_kernel(x_ptr, x_stride, q_ptr, scale_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    row64 = rows.to(tl.int64)[:, None]
    q, scale = quantized_rows(tl.load(x_ptr + row64 * x_stride + cols, mask=mask, other=0.0).to(tl.float32))
    tl.store(q_ptr + row64 * N + cols, q.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + rows, scale, mask=rows < M)


@triton.jit
def _quantize_wide_kernel(x_ptr, x_stride, q_ptr, scale_ptr, N, BLOCK: tl.constexpr):
    """One row a program, a block of columns at a time: once for the scale and once for the values."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    size = tl.full((1, BLOCK), 0.0, tl.float32)
    for first in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * x_stride + first + cols, mask=first + cols < N, other=0.0).to(tl.float32)
        size = tl.maximum(size, _magnitude(x))
    scale, inverse = _scale_of(tl.max(size, axis=1))
    for first in range(0, N, BLOCK):
        at, mask = first + cols, first + cols < N
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * N + at, _scaled(x, inverse).to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _dequantize_kernel(q_ptr, scale_ptr, out_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scale_ptr + rows, mask=rows < M, other=0.0)[:, None]
    row64 = rows.to(tl.int64)[:, None]
    for first in range(0, N, BLOCK):
        cols = first + tl.arange(0, BLOCK)[None, :]
        mask = (rows < M)[:, None] & (cols < N)
        q = tl.load(q_ptr + row64 * N + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row64 * N + cols, (q * scale).to(out_ptr.dtype.element_ty), mask=mask)


def dequantize_fp8_triton(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """One launch: (M, N) in ``dtype`` of contiguous e4m3 values (M, N) and the scales (M,) of their rows."""
    count, width = data.shape
    out = torch.empty((count, width), dtype=store_dtype(dtype), device=data.device)
    if interpreting():
        data = data.float()  # which NumPy knows
    if out.numel():
        block = min(triton.next_power_of_2(width), 2048)
        rows = max(1, 2048 // block)
        with on_device_of(data):
            grid = (triton.cdiv(count, rows),)
            _dequantize_kernel[grid](data, scale, out, count, width, ROWS=rows, BLOCK=block, num_warps=4)
    return rounded(out, dtype)


def e4m3_store() -> torch.dtype:
    """The dtype that kernels store quantized values in: e4m3, or float32 in the interpreter, which truncates."""
    return torch.float32 if interpreting() else E4M3


def quantize_fp8_triton(x: Tensor, *, widest: int = WIDEST_ROW) -> tuple[Tensor, Tensor]:
    """One launch: (e4m3 (M, N), scale (M,) float32) of x (M, N) floating. Rows above ``widest`` are read twice."""
    count, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty((count, width), dtype=e4m3_store(), device=x.device)
    scale = torch.empty(count, dtype=torch.float32, device=x.device)
    if not width:
        scale.fill_(1.0)
    elif count:
        block = triton.next_power_of_2(width)
        with on_device_of(x):
            if width > widest:
                block = min(widest, 8192)
                _quantize_wide_kernel[(count,)](x, x.stride(0), q, scale, width, BLOCK=block, num_warps=8)
            else:
                rows = max(1, 2048 // block)
                # Warps measured on one H200 at widths of 3584 to 28672: few for narrow rows, 32 for the widest.
                warps = 4 if block <= 8192 else block // 1024
                grid = (triton.cdiv(count, rows),)
                _quantize_kernel[grid](x, x.stride(0), q, scale, count, width, ROWS=rows, BLOCK=block, num_warps=warps)
    return q.to(E4M3), scale


def quantize_fp8_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """``quantize_fp8_triton`` in plain torch: the same bits."""
    wide = x.float()
    size = wide.abs()
    finite = size < float("inf")
    absmax = torch.where(finite, size, 0.0).amax(1) if x.shape[1] else wide.new_zeros(x.shape[0])
    exponent = (((absmax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp(min=1)
    exponent = torch.where(absmax == 0.0, 127, exponent).to(torch.int32)
    scale = (exponent << 23).view(torch.float32)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return torch.where(finite, wide * inverse[:, None], float("nan")).to(E4M3), scale


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
