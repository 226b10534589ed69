"""Gated output of attention: each head's output times a sigmoid, of a gate a feature or of one a head.

Legend: B batch, S sequence, H heads, D head size.

    y = x * sigmoid(g)
    dx = dy * sigmoid(g)
    dg = dy * x * sigmoid(g) * sigmoid(-g)      summed over the features of a head where g is one number a head

Qwen3.5 takes queries and gates by head from one projection, Muse-Glimmer the gates of all features and LFM3 one a head
from a projection of their own. ``sigmoid(-g)`` is ``1 - sigmoid(g)`` without the cancellation. The arithmetic is
float32 with one rounding when stored; backward reads x, g and dy, and the sigmoid is not saved.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import (
    BackendName,
    accumulate_dtype,
    choose_backend,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
)
from ftkernels.primitives import sigmoid

#: Elements of a program's tile: each of its 256 threads has 16 of them, of every tensor.
_ELEMENTS = 4096


def output_gate(x: Tensor, gate: Tensor, *, backend: BackendName = "auto") -> Tensor:
    """``x * sigmoid(gate)``, contiguous, in the dtype the two promote to; the module docstring has the formula.

    Args:
        x: (B, S, H, D), attention's output by token. Any strides; copied only where the features of a head lie apart.
        gate: (B, S, H, D) or (B, S, H * D), a number a feature, or (B, S, H), a number a head. Any strides, such as the
            half of each head of a (B, S, H, 2 * D); copied as x.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    gate = _by_head(x, gate)
    if not choose_backend(x.device, backend).is_triton:
        return output_gate_reference(x, gate)
    out: Tensor = _OutputGate.apply(x, gate)  # type: ignore[no-untyped-call]
    return out


def output_gate_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The same in plain torch, differentiable; float32 inside (float64 for float64), one rounding."""
    gate = _by_head(x, gate)
    dtype = torch.promote_types(x.dtype, gate.dtype)
    acc = accumulate_dtype(dtype)
    share = torch.sigmoid(gate.to(acc))
    return (x.to(acc) * (share if gate.dim() == 4 else share[..., None])).to(dtype).contiguous()


@triton.jit
def _places(batch, token, stride_b, stride_s, stride_h, h, d):
    """Offsets of one token's heads ``h`` and features ``d``, in 64 bits."""
    return batch * stride_b + token * stride_s + h.to(tl.int64) * stride_h + d


@triton.jit
def _gate_kernel(
    x_ptr,
    x_stride_b,
    x_stride_s,
    x_stride_h,
    gate_ptr,
    gate_stride_b,
    gate_stride_s,
    gate_stride_h,
    dy_ptr,
    dy_stride_b,
    dy_stride_s,
    dy_stride_h,
    out_ptr,
    d_gate_ptr,
    S,
    heads,
    BACKWARD: tl.constexpr,
    PER_HEAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """A token and ``HEADS`` of its heads a program. ``out_ptr`` takes y, or dx in backward."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // S, row % S
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h, d = head[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (h < heads) & (d < D)
    x = tl.load(x_ptr + _places(batch, token, x_stride_b, x_stride_s, x_stride_h, h, d), mask=mask, other=0.0).to(ACC)
    if PER_HEAD:
        gate_at = gate_ptr + _places(batch, token, gate_stride_b, gate_stride_s, gate_stride_h, head, 0)
        g = tl.load(gate_at, mask=head < heads, other=0.0).to(ACC)
        share = sigmoid(g)[:, None]
    else:
        gate_at = gate_ptr + _places(batch, token, gate_stride_b, gate_stride_s, gate_stride_h, h, d)
        g = tl.load(gate_at, mask=mask, other=0.0).to(ACC)
        share = sigmoid(g)
    out_at = (row * heads + h) * D + d
    if BACKWARD:
        dy_at = dy_ptr + _places(batch, token, dy_stride_b, dy_stride_s, dy_stride_h, h, d)
        dy = tl.load(dy_at, mask=mask, other=0.0).to(ACC)
        tl.store(out_ptr + out_at, (dy * share).to(out_ptr.dtype.element_ty), mask=mask)
        if PER_HEAD:
            d_gate = tl.sum(dy * x, axis=1) * sigmoid(g) * sigmoid(-g)
            tl.store(d_gate_ptr + row * heads + head, d_gate.to(d_gate_ptr.dtype.element_ty), mask=head < heads)
        else:
            d_gate = dy * x * share * sigmoid(-g)
            tl.store(d_gate_ptr + out_at, d_gate.to(d_gate_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(out_ptr + out_at, (x * share).to(out_ptr.dtype.element_ty), mask=mask)


def _launch(x: Tensor, gate: Tensor, dy: Tensor, out: Tensor, d_gate: Tensor, *, backward: bool) -> None:
    """One launch; in all tensors a head's features lie next to each other, ``out`` and ``d_gate`` are contiguous."""
    batch, length, heads, size = x.shape
    block = triton.next_power_of_2(size)
    group = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // block))
    with on_device_of(x):
        _gate_kernel[(batch * length, triton.cdiv(heads, group))](
            x,
            *x.stride()[:3],
            gate,
            *gate.stride()[:3],
            dy,
            *dy.stride()[:3],
            out,
            d_gate,
            length,
            heads,
            BACKWARD=backward,
            PER_HEAD=gate.dim() == 3,
            D=size,
            BLOCK_D=block,
            HEADS=group,
            ACC=triton_dtype(torch.promote_types(x.dtype, gate.dtype)),
            num_warps=8,
        )


class _OutputGate(torch.autograd.Function):
    """Saves x and the gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        dtype = torch.promote_types(x.dtype, gate.dtype)
        out = torch.empty(x.shape, dtype=store_dtype(dtype), device=x.device)
        if out.numel():
            x, gate = _readable(x), _readable(gate)
            _launch(x, gate, x, out, out, backward=False)
        return rounded(out, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        dx, d_gate = (torch.empty(t.shape, dtype=store_dtype(t.dtype), device=t.device) for t in (x, gate))
        if dx.numel():
            _launch(_readable(x), _readable(gate), _readable(dy), dx, d_gate, backward=True)
        return rounded(dx, x.dtype), rounded(d_gate, gate.dtype)


def _readable(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy where the features of a head lie apart; heads of one number each may."""
    return tensor if tensor.dim() == 3 or tensor.stride(-1) == 1 else tensor.contiguous()


def _by_head(x: Tensor, gate: Tensor) -> Tensor:
    """The gate as (B, S, H, D) or (B, S, H)."""
    if x.dim() != 4 or not x.is_floating_point() or not gate.is_floating_point():
        raise ValueError(f"expected floating x (B, S, H, D), got {tuple(x.shape)} in {x.dtype} and {gate.dtype}")
    per_token, heads, size = x.shape[:2], x.shape[2], x.shape[3]
    if gate.shape == (*per_token, heads * size) and size > 1:
        return gate.unflatten(-1, (heads, size))
    if gate.shape not in (x.shape, x.shape[:3]):
        raise ValueError(
            f"the gate {tuple(gate.shape)} has neither a number a feature nor one a head of {tuple(x.shape)}"
        )
    return gate
