"""Decay and write strength of gated delta nets, from two projections of the token.

Legend: B batch, S tokens, H value heads.

    g = -exp(A_log) softplus(a + dt_bias)          beta = sigmoid(b)

    da = -dg exp(A_log) sigmoid(a + dt_bias)       db = d_beta beta (1 - beta)
    dA_log = sum over tokens of dg g               d_dt_bias = sum over tokens of da

Both outputs are float32, whatever the inputs' dtype: g is summed over tokens and exponentiated. transformers rounds
beta to the model's dtype. The sums are partial sums added in a fixed order. Kept for backward: the inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendName,
    accumulate_dtype,
    choose_backend,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
)
from ftkernels.primitives import as_rows, column_sums, row_starts, sigmoid

#: Elements of a tile, and programs that share the tokens.
_ELEMENTS, _PROGRAMS = 2048, 264


class Gates(NamedTuple):
    """The decay's logarithm and the write strength, (B, S, H) each, float32 (float64 for float64)."""

    g: Tensor
    beta: Tensor


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, *, backend: BackendName = "auto") -> Gates:
    """The gates of tokens; the module docstring has the formulas.

    Args:
        a, b: (B, S, H), any strides.
        a_log, dt_bias: (H,).

    Raises:
        ValueError: shapes that do not fit.
    """
    if a.shape != b.shape or a.dim() < 1 or a_log.shape != a.shape[-1:] or dt_bias.shape != a.shape[-1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (a, b, a_log, dt_bias))
        raise ValueError(f"expected a and b (..., H), A_log and dt_bias (H,), got {shapes}")
    if not choose_backend(a.device, backend).is_triton or a.dtype == torch.float64:
        return delta_gates_reference(a, b, a_log, dt_bias)
    return Gates(*_Gates.apply(a, b, a_log, dt_bias))  # type: ignore[no-untyped-call]


def delta_gates_reference(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> Gates:
    """The same in plain torch, differentiable."""
    acc = accumulate_dtype(a.dtype)
    x = a.to(acc) + dt_bias.to(acc)
    # logaddexp has no threshold beyond which it is x itself, as torch's softplus has.
    return Gates(-a_log.to(acc).exp() * torch.logaddexp(x, torch.zeros_like(x)), torch.sigmoid(b.to(acc)))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to relative rounding for very negative x as well."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 + e * (-0.5 + e * (0.3333333333333333 + e * (-0.25 + e * 0.2))))
    return tl.maximum(x, 0.0) + tl.where(e < 0.03, small, tl.log(1.0 + e))


@triton.jit
def _gates_kernel(
    a_ptr,
    a_inner,
    a_outer_stride,
    a_inner_stride,
    b_ptr,
    b_inner,
    b_outer_stride,
    b_inner_stride,
    a_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    da_ptr,
    da_inner,
    da_outer_stride,
    da_inner_stride,
    db_ptr,
    db_inner,
    db_outer_stride,
    db_inner_stride,
    sums_ptr,
    M,
    H,
    blocks,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes g and beta, or reads their gradients from there and writes da, db and sums of each program."""
    cols = tl.arange(0, BLOCK)
    rate = -tl.exp(tl.load(a_log_ptr + cols, mask=cols < H, other=0.0).to(tl.float32))[None, :]
    shift = tl.load(dt_bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    d_log, d_shift = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(blocks):
        rows = (tl.program_id(0) * blocks + block) * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (cols < H)[None, :]
        a = tl.load(
            a_ptr + row_starts(rows, a_inner, a_outer_stride, a_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        b = tl.load(
            b_ptr + row_starts(rows, b_inner, b_outer_stride, b_inner_stride)[:, None] + cols[None, :],
            mask=mask,
            other=0.0,
        )
        x, b = a.to(tl.float32) + shift, b.to(tl.float32)
        at = rows.to(tl.int64)[:, None] * H + cols[None, :]
        if BACKWARD:
            dg = tl.load(g_ptr + at, mask=mask, other=0.0)
            da = dg * rate * sigmoid(x)
            db = tl.load(beta_ptr + at, mask=mask, other=0.0) * sigmoid(b) * sigmoid(-b)
            d_log += dg * rate * _softplus(x)
            d_shift += da
            da_at = da_ptr + row_starts(rows, da_inner, da_outer_stride, da_inner_stride)[:, None] + cols[None, :]
            db_at = db_ptr + row_starts(rows, db_inner, db_outer_stride, db_inner_stride)[:, None] + cols[None, :]
            tl.store(da_at, da.to(da_ptr.dtype.element_ty), mask=mask)
            tl.store(db_at, db.to(db_ptr.dtype.element_ty), mask=mask)
        else:
            tl.store(g_ptr + at, rate * _softplus(x), mask=mask)
            tl.store(beta_ptr + at, sigmoid(b), mask=mask)
    if BACKWARD:
        sums_at = sums_ptr + tl.program_id(0) * (2 * H) + cols
        tl.store(sums_at, tl.sum(d_log, 0), mask=cols < H)
        tl.store(sums_at + H, tl.sum(d_shift, 0), mask=cols < H)


def launch(tensors: tuple[Tensor, Tensor, Tensor, Tensor], outs: Gates, grads: Gates | None) -> Tensor:
    """One launch; gives the sums (2, H) of backward, where ``outs`` are the gates' gradients, contiguous, and ``grads``
    da and db, of any strides that rows can have.
    """
    a, b, a_log, dt_bias = tensors
    heads, left, right = a.shape[-1], as_rows(a), as_rows(b)
    into = [as_rows(t) for t in (outs if grads is None else grads)]
    block = triton.next_power_of_2(heads)
    rows = max(1, _ELEMENTS // block)
    tiles = triton.cdiv(left.count, rows)
    blocks = 1 if grads is None else triton.cdiv(tiles, 1 if interpreting() else _PROGRAMS)
    programs = triton.cdiv(tiles, blocks)
    sums = torch.empty((programs, 2 * heads) if grads is not None else (0,), device=a.device)
    with on_device_of(a):
        _gates_kernel[(programs,)](
            *left.addresses,
            *right.addresses,
            a_log.contiguous(),
            dt_bias.contiguous(),
            *outs,
            *into[0].addresses,
            *into[1].addresses,
            sums,
            left.count,
            heads,
            blocks,
            BACKWARD=grads is not None,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
        )
    return sums if grads is None else column_sums(sums).view(2, heads)


class _Gates(torch.autograd.Function):
    """Saves its inputs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b, a_log, dt_bias)
        outs = Gates(*(torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2)))
        if a.numel():
            launch((a, b, a_log, dt_bias), outs, None)
        return outs.g, outs.beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor, d_beta: Tensor) -> tuple[Tensor, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        grads = Gates(*(torch.empty(t.shape, dtype=store_dtype(t.dtype), device=t.device) for t in (a, b)))
        sums = torch.zeros((2, a.shape[-1]), device=a.device)
        if a.numel():
            sums = launch((a, b, a_log, dt_bias), Gates(dg.contiguous(), d_beta.contiguous()), grads)
        return (
            rounded(grads.g, a.dtype),
            rounded(grads.beta, b.dtype),
            sums[0].to(a_log.dtype),
            sums[1].to(dt_bias.dtype),
        )
