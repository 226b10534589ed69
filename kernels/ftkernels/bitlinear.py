"""The linear layer of BitNet b1.58: int8 activations times ternary weights, with straight-through gradients.

Legend: M rows (tokens), I inputs, O outputs; q, step, t, s as ``ftkernels.ternary`` makes them.

    y  = (q tᵀ) * step * s + b        the product in integers, exact; then float32, and one rounding to y's dtype
    dx = dy (s t)                     rounding counts as the identity (straight through: arXiv 1308.3432, 2310.11453)
    dW = dyᵀ (step q)                 likewise: the gradient of the master weights, in float32
    db = sum over rows of dy

Backward saves q and step, a byte an element, in place of x. Products of backward are taken of operands in y's dtype; dW
is written in that of the masters.

Quantizing is a step of its own (``quantize_int8``), so that layers that read the same x share it and a norm can do it
while it has the row (``norm_quantize``). It makes ``Int8Rows``: q, step, and a tensor of x's shape without memory of
its own, through which autograd passes the gradient of x on.

In conversion the quantized values are mixed with the exact ones: x + share (Q(x) - x), W + share (Q(W) - W). With a
share below 1 the product is an ordinary one (``mixed_linear``); with 0 it is ``F.linear``'s, bit for bit.

Rows of int8 are the same bits as in plain torch: divisions are correctly rounded, and nothing
is contracted into fused multiply-adds. A row that holds NaN or infinity has a step that is not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, choose_backend, gpu_of, on_device_of, triton_store_dtype, without_autocast
from ftkernels.gemm import mm_accurate
from ftkernels.int8_product import int8_product
from ftkernels.limits import WIDEST_ROW, why_no_tensor_cores
from ftkernels.primitives import as_rows, row_starts
from ftkernels.rms_norm import norm_backend, norm_backward, rms_norm_reference
from ftkernels.ternary import (
    SMALLEST,
    Ternary,
    dequantize_int8_triton,
    quantize_int8_torch,
    ternarise,
    ternarise_triton,
)

#: Up to so many inputs the products of int8 and ternary values add up exactly in float32: 128 I < 2^24.
_EXACT_IN_FLOAT32 = 2**17 - 1


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Activations (..., I) in int8.

    Attributes:
        passage: (..., I) in the dtype of gradients; every element shares one that means nothing.
        q: (M, I) int8.
        step: (M,) float32.
    """

    passage: Tensor
    q: Tensor
    step: Tensor

    @property
    def shape(self) -> torch.Size:
        """(..., I)."""
        return self.passage.shape


def round_weight(weight: Tensor, *, backend: BackendName = "auto") -> Ternary:
    """``ternarise`` of ``weight`` (O, I), by the kernels where they run: the same values."""
    if not weight.numel() or not _by_kernels(weight, backend):
        return ternarise(weight)
    return Ternary(*ternarise_triton(weight))


def quantize_int8(x: Tensor, *, backend: BackendName = "auto") -> Int8Rows:
    """``x`` (..., I), floating, in int8 by rows. Its gradient is that of what it stands for."""
    passage, q, step = _Quantize.apply(x, product_dtype(x), backend)
    return Int8Rows(passage, q, step)


def norm_quantize(x: Tensor, weight: Tensor, eps: float, *, backend: BackendName = "auto") -> Int8Rows:
    """``quantize_int8`` of the RMSNorm of ``x`` (..., I) with ``weight`` (I,), llama's form (``ftkernels.rms_norm``).

    With the kernels the norm's output is never written: one launch reads x and writes q and step.
    """
    if not norm_backend(x, backend).is_triton:
        return quantize_int8(rms_norm_reference(x, weight, eps), backend=backend)
    passage, q, step = _NormQuantize.apply(x, weight, eps, product_dtype(x))
    return Int8Rows(passage, q, step)


def bit_linear(
    x: Int8Rows,
    weight: Tensor | None,
    ternary: Ternary,
    bias: Tensor | None = None,
    *,
    backend: BackendName = "auto",
) -> Tensor:
    """(..., I) -> (..., O), in the dtype of ``x.passage``; the module docstring has the formulas.

    Args:
        weight: The master weights (O, I) that get the gradient; None where the ternary ones are frozen.
        ternary: ``ternarise(weight)``.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.shape[-1] != ternary.shape[1] or (weight is not None and weight.shape != ternary.shape):
        masters = "none" if weight is None else tuple(weight.shape)
        raise ValueError(f"x {tuple(x.shape)}, ternary weight {tuple(ternary.shape)} and masters {masters} do not fit")
    out: Tensor = _BitLinear.apply(x.passage, x.q, x.step, weight, bias, ternary.data, ternary.scale, backend)
    return out


def mixed_linear(x: Tensor, weight: Tensor, ternary: Ternary, bias: Tensor | None, share: float) -> Tensor:
    """``F.linear`` of x and weight, each moved by ``share`` (0 to 1) towards its quantized values; straight through."""
    if share == 0.0:
        return F.linear(x, weight, bias)
    with torch.no_grad():
        q, step = quantize_int8_torch(x.reshape(-1, x.shape[-1]))
        dx = share * ((q * step[:, None]).view(x.shape) - x.float())
        dw = share * (ternary.dequantize(torch.float32) - weight.float())
    return F.linear(x + dx.to(x.dtype), weight + dw.to(weight.dtype), bias)


def bit_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, ternary: Ternary) -> Tensor:
    """The layer as the papers write it, in plain torch and x's dtype: quantized values less what is detached."""
    rows = x.reshape(-1, x.shape[-1])
    q, step = quantize_int8_torch(rows)
    x_q = (q * step[:, None]).to(x.dtype).view(x.shape)
    w_q = ternary.dequantize(weight.dtype)
    return F.linear(x + (x_q - x).detach(), weight + (w_q - weight).detach(), bias)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a linear layer's output has for ``x``: autocast's, or x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def integer_product(q: Tensor, ternary: Tensor) -> Tensor:
    """q tᵀ in plain torch: (M, I) int8, (O, I) int8 -> (M, O) float32 or float64, whole numbers, exact."""
    dtype = torch.float32 if q.shape[1] <= _EXACT_IN_FLOAT32 else torch.float64
    return torch.mm(q.to(dtype), ternary.to(dtype).t())


def int8_on_tensor_cores(q: Tensor, dtype: torch.dtype, backend: BackendName) -> bool:
    """True when the int8 kernel takes a product: Triton kernels run, and the GPU has such instructions."""
    if not choose_backend(q.device, backend).is_triton or dtype == torch.float64:
        return False
    return q.numel() > 0 and why_no_tensor_cores(gpu_of(q.device)) is None


def _by_kernels(x: Tensor, backend: BackendName) -> bool:
    return choose_backend(x.device, backend).is_triton and x.dtype != torch.float64


def _dequantize(values: Tensor, scale: Tensor, dtype: torch.dtype, backend: BackendName) -> Tensor:
    """``values`` (M, N) int8 times ``scale``, (M,) or (), rounded to ``dtype`` once."""
    if dtype != torch.float64 and _by_kernels(values, backend):
        return dequantize_int8_triton(values.contiguous(), scale, dtype)
    return (values * (scale[:, None] if scale.dim() else scale)).to(dtype)


def _passage(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=x.device).expand(x.shape)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, backend: BackendName) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        q, step = quantize_int8_triton(rows) if _by_kernels(x, backend) else quantize_int8_torch(rows)
        ctx.mark_non_differentiable(q, step)
        ctx.x_dtype = x.dtype
        return _passage(x, dtype), q, step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.to(ctx.x_dtype), None, None


class _NormQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        q, step, rstd = norm_quantize_triton(x, weight, eps)
        ctx.mark_non_differentiable(q, step)
        ctx.save_for_backward(x, weight, rstd)
        return _passage(x, dtype), q, step

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx, dw = norm_backward(gradient, x, weight, rstd, "llama", want_dw=ctx.needs_input_grad[1])
        return dx.to(x.dtype), None if dw is None else dw.to(weight.dtype), None, None


class _BitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        passage: Tensor,
        q: Tensor,
        step: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        ternary: Tensor,
        scale: Tensor,
        backend: BackendName,
    ) -> Tensor:
        dtype = passage.dtype
        if weight is None:  # frozen: x is needed for no gradient
            ctx.save_for_backward(None, None, ternary, scale)
        else:
            ctx.save_for_backward(q, step, ternary, scale)
        ctx.masters = None if weight is None else weight.dtype
        ctx.bias = None if bias is None else bias.dtype
        ctx.backend = backend
        with without_autocast(q):
            if int8_on_tensor_cores(q, dtype, backend):
                out = int8_product(q, step, ternary, scale, bias, dtype)
            else:
                out = integer_product(q, ternary) * step[:, None] * scale
                if bias is not None:
                    out = out + bias.to(out.dtype)
        return out.to(dtype).view(*passage.shape[:-1], ternary.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, step, ternary, scale = ctx.saved_tensors
        wants_x, _, _, wants_w, wants_b = ctx.needs_input_grad[:5]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        with without_autocast(dy):
            if wants_x:
                weight = _dequantize(ternary, scale, dy.dtype, ctx.backend)
                dx = torch.mm(rows, weight).view(*dy.shape[:-1], ternary.shape[1])
                del weight
            if wants_w:
                dw = mm_accurate(rows.t(), _dequantize(q, step, dy.dtype, ctx.backend)).to(ctx.masters)
            if wants_b:
                db = rows.sum(0, dtype=torch.float32).to(ctx.bias)
        return dx, None, None, dw, db, None, None, None


_SMALLEST = tl.constexpr(SMALLEST)
# Adding and taking away 1.5 * 2^23 rounds a float32 of less than 2^22 to the nearest whole number, halves to even.
_ROUNDING = tl.constexpr(12582912.0)


@triton.jit
def _steps(absmax):
    """(step, 1 / step) of rows with these largest magnitudes (``_magnitude``)."""
    absmax = absmax.to(tl.float32, bitcast=True)
    absmax = tl.where(absmax < _SMALLEST, _SMALLEST, absmax)  # which leaves NaN as it is
    return tl.div_rn(absmax, tl.full(absmax.shape, 127.0, tl.float32)), tl.div_rn(
        tl.full(absmax.shape, 127.0, tl.float32), absmax
    )


@triton.jit
def _magnitude(x):
    """The bits of |x|. As whole numbers they are in the order of the numbers, and NaN is the largest: a maximum of
    numbers passes NaN over, and a diverged model would have finite losses.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded(x, inverse):
    scaled = tl.minimum(tl.maximum(x * inverse[:, None], -128.0), 127.0)
    return (scaled + _ROUNDING) - _ROUNDING


@triton.jit
def _quantize_kernel(x_ptr, x_stride, q_ptr, step_ptr, M, N, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < N)
    row64 = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row64 * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    step, inverse = _steps(tl.max(_magnitude(x), axis=1))
    tl.store(q_ptr + row64 * N + cols, _rounded(x, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + rows, step, mask=rows < M)


@triton.jit
def _quantize_wide_kernel(x_ptr, x_stride, q_ptr, step_ptr, N, BLOCK: tl.constexpr):
    """One row a program, a block of columns at a time: once for the step and once for the values."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    size = tl.full((1, BLOCK), 0, tl.int32)
    for first in range(0, N, BLOCK):
        x = tl.load(x_ptr + row * x_stride + first + cols, mask=first + cols < N, other=0.0).to(tl.float32)
        size = tl.maximum(size, _magnitude(x))
    step, inverse = _steps(tl.max(size, axis=1))
    for first in range(0, N, BLOCK):
        at, mask = first + cols, first + cols < N
        x = tl.load(x_ptr + row * x_stride + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(q_ptr + row * N + at, _rounded(x, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + row + tl.arange(0, 1), step)


@triton.jit
def _norm_quantize_kernel(
    x_ptr,
    x_inner,
    x_outer_stride,
    x_inner_stride,
    w_ptr,
    q_ptr,
    step_ptr,
    rstd_ptr,
    M,
    H,
    eps,
    N_DTYPE: tl.constexpr,
    Y_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The norm's output, rounded where the norm alone would round it, goes to int8 without being written."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < M)[:, None] & (cols < H)
    starts = row_starts(rows, x_inner, x_outer_stride, x_inner_stride)
    x = tl.load(x_ptr + starts[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / H + eps)
    y = ((x * rstd[:, None]).to(N_DTYPE).to(tl.float32) * w).to(Y_DTYPE).to(tl.float32)
    step, inverse = _steps(tl.max(_magnitude(y), axis=1))
    tl.store(q_ptr + rows.to(tl.int64)[:, None] * H + cols, _rounded(y, inverse).to(tl.int8), mask=mask)
    tl.store(step_ptr + rows, step, mask=rows < M)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)


def _rows_a_program(width: int) -> tuple[int, int, int]:
    """(rows, padded width, warps)."""
    block = triton.next_power_of_2(width)
    return max(1, 2048 // block), block, 4 if block <= 8192 else block // 1024


def quantize_int8_triton(x: Tensor, *, widest: int = WIDEST_ROW) -> tuple[Tensor, Tensor]:
    """``ternary.quantize_int8_torch`` in one launch: the same bits. Rows above ``widest`` are read twice."""
    count, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    q = torch.empty((count, width), dtype=torch.int8, device=x.device)
    step = torch.empty(count, dtype=torch.float32, device=x.device)
    if not width:
        return q, step.fill_(SMALLEST / 127)
    if count:
        with on_device_of(x):
            if width > widest:
                block = min(triton.next_power_of_2(widest), 8192)
                _quantize_wide_kernel[(count,)](
                    x, x.stride(0), q, step, width, BLOCK=block, num_warps=8, enable_fp_fusion=False
                )
            else:
                rows, block, warps = _rows_a_program(width)
                _quantize_kernel[(triton.cdiv(count, rows),)](
                    x,
                    x.stride(0),
                    q,
                    step,
                    count,
                    width,
                    ROWS=rows,
                    BLOCK=block,
                    num_warps=warps,
                    enable_fp_fusion=False,
                )
    return q, step


def norm_quantize_triton(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(q (M, H) int8, step (M,), rstd (M,) float32) of the llama-form RMSNorm of x (..., H), in one launch."""
    source, width = as_rows(x), x.shape[-1]
    q = torch.empty((source.count, width), dtype=torch.int8, device=x.device)
    step, rstd = (torch.empty(source.count, dtype=torch.float32, device=x.device) for _ in range(2))
    if source.count and width:
        rows, block, warps = _rows_a_program(width)
        with on_device_of(x):
            _norm_quantize_kernel[(triton.cdiv(source.count, rows),)](
                *source.addresses,
                weight,
                q,
                step,
                rstd,
                source.count,
                width,
                float(eps),
                N_DTYPE=triton_store_dtype(x.dtype),
                Y_DTYPE=triton_store_dtype(torch.promote_types(x.dtype, weight.dtype)),
                ROWS=rows,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return q, step, rstd
