"""Causal depthwise convolution over tokens with SiLU, in documents, as gated delta nets and Mamba have it before them.

Legend: B batch, S tokens, C channels, W width of the filter, 2 to 8.

    z_tc = bias_c + sum over w < W of weight_cw x_(t - W + 1 + w)c          y = silu(z) = z sigmoid(z)

An input before the first token of t's document counts as zero. Backward forms z again:

    dz = dy silu'(z)      dx_t = sum over o < W of weight_(W - 1 - o) dz_(t + o), of later tokens in t's document
    dweight_w = sum over t of dz_t x_(t - W + 1 + w)      dbias = sum over t of dz_t

The arithmetic is float32 with one rounding when stored; dweight and dbias are partial sums added in a fixed order. Kept
for backward: x, which is the projection's output.
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
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
    triton_dtype,
)
from ftkernels.limits import FILTER_WIDTHS
from ftkernels.primitives import activate, column_sums, sigmoid

#: Tokens and channels of a tile, and programs that share the tokens where dweight is wanted, for each 64 channels.
_TOKENS, _CHANNELS, _SHARES = 32, 64, 64


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """The convolution and SiLU, (B, S, C) in x's dtype; the module docstring has the formulas.

    Args:
        x: (B, S, C), any strides; copied only where the channels of a token lie apart.
        weight: (C, W). bias: (C,) or None.
        starts: (B or 1, S) int32: for each token the index of its document's first token. None: one document a row.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(x, weight, bias, starts)
    if not choose_backend(x.device, backend).is_triton or x.dtype == torch.float64:
        return causal_conv_reference(x, weight, bias, starts=starts)
    out: Tensor = _CausalConv.apply(x, weight, bias, starts)  # type: ignore[no-untyped-call]
    return out


def causal_conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    starts: Tensor | None = None,
) -> Tensor:
    """The same in plain torch, differentiable; float32 inside (float64 for float64), one rounding."""
    acc, length, width = accumulate_dtype(x.dtype), x.shape[1], weight.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], width - 1, x.shape[2], dtype=acc), x.to(acc)], 1)
    tokens = torch.arange(length, device=x.device)
    document = torch.zeros_like(tokens)[None] if starts is None else starts
    z = torch.zeros_like(x, dtype=acc) if bias is None else bias.to(acc).expand(x.shape)
    for w in range(width):
        source = tokens - (width - 1) + w
        inside = source >= document
        z = z + weight[:, w].to(acc) * torch.where(inside[..., None], padded[:, w : w + length], 0.0)
    return (z * torch.sigmoid(z)).to(x.dtype)


def inputs_at(x: Tensor, width: int, ends: Tensor, starts: Tensor | None = None) -> Tensor:
    """The states of a filter of ``width`` after the tokens ``ends`` (E,) of one row x (1, S, C): (E, C, W - 1), zero
    before the first token of each one's document.
    """
    source = ends[:, None].long() + torch.arange(2 - width, 1, device=x.device)
    begins = torch.zeros_like(ends) if starts is None else starts[0, ends]
    return torch.where((source >= begins[:, None])[..., None], x[0, source.clamp(min=0)], 0.0).transpose(1, 2)


@triton.jit
def _input(x_ptr, token, there, begin, cols, col_mask, x_stride_s, BACK: tl.constexpr, ACC: tl.constexpr):
    """The inputs ``BACK`` before each token, zero where that is another document's or ``there`` is false."""
    source = token - BACK
    inside = (there & (source >= begin) & (source >= 0))[:, None] & col_mask[None, :]
    at = x_ptr + source.to(tl.int64)[:, None] * x_stride_s + cols[None, :]
    return tl.load(at, mask=inside, other=0.0).to(ACC)


@triton.jit
def _before_activation(x_ptr, weight_ptr, bias_ptr, token, there, begin, cols, col_mask, x_stride_s,
                       W: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    z = tl.zeros((T, BLOCK), ACC)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=col_mask, other=0.0).to(ACC)[None, :]
    for w in tl.static_range(W):
        x = _input(x_ptr, token, there, begin, cols, col_mask, x_stride_s, W - 1 - w, ACC)
        z += x * tl.load(weight_ptr + cols * W + w, mask=col_mask, other=0.0).to(ACC)[None, :]
    return z


@triton.jit
def _begins(starts_ptr, batch, starts_stride, token, there):
    """The first token of each token's document."""
    begin = token * 0
    if starts_ptr is not None:
        begin = tl.load(starts_ptr + batch * starts_stride + token, mask=there, other=0)
    return begin


@triton.jit
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    out_ptr,
    x_stride_b,
    x_stride_s,
    starts_stride,
    S,
    channels,
    W: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    tiles = tl.cdiv(S, T)
    batch, token = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * T + tl.arange(0, T)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, col_mask = token < S, cols < channels
    begin = _begins(starts_ptr, batch, starts_stride, token, there)
    z = _before_activation(x_ptr + batch * x_stride_b, weight_ptr, bias_ptr, token, there, begin, cols,
                           col_mask, x_stride_s, W, T, BLOCK, ACC)  # fmt: skip
    at = out_ptr + (batch * S + token)[:, None] * channels + cols[None, :]
    tl.store(at, (z * sigmoid(z)).to(out_ptr.dtype.element_ty), mask=there[:, None] & col_mask[None, :])


@triton.jit
def _backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    starts_ptr,
    dx_ptr,
    dw_ptr,
    dy_stride_b,
    dy_stride_s,
    x_stride_b,
    x_stride_s,
    dx_stride_b,
    dx_stride_s,
    starts_stride,
    S,
    channels,
    shares,
    blocks,
    WANT_DW: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    T: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """``blocks`` tiles of T tokens of one row."""
    batch, share = (tl.program_id(0) // shares).to(tl.int64), tl.program_id(0) % shares
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    col_mask = cols < channels
    tap = tl.arange(0, TAPS)
    x_ptr += batch * x_stride_b
    dy_ptr += batch * dy_stride_b
    dw = tl.zeros((TAPS, BLOCK), ACC)
    for block in range(blocks):
        token = (share * blocks + block) * T + tl.arange(0, T)
        dx = tl.zeros((T, BLOCK), ACC)
        for o in tl.static_range(W):
            reader = token + o
            there = reader < S
            begin = _begins(starts_ptr, batch, starts_stride, reader, there)
            z = _before_activation(x_ptr, weight_ptr, bias_ptr, reader, there, begin, cols, col_mask,
                                   x_stride_s, W, T, BLOCK, ACC)  # fmt: skip
            _, slope = activate(z, "silu")
            at = dy_ptr + reader.to(tl.int64)[:, None] * dy_stride_s + cols[None, :]
            dz = slope * tl.load(at, mask=there[:, None] & col_mask[None, :], other=0.0).to(ACC)
            weight = tl.load(weight_ptr + cols * W + (W - 1 - o), mask=col_mask, other=0.0).to(ACC)
            dx += tl.where((token >= begin)[:, None], dz * weight[None, :], 0.0)
            if WANT_DW and o == 0:
                dw += tl.where(tap[:, None] == W, tl.sum(dz, 0)[None, :], 0.0)
                for w in tl.static_range(W):
                    x = _input(x_ptr, reader, there, begin, cols, col_mask, x_stride_s, W - 1 - w, ACC)
                    dw += tl.where(tap[:, None] == w, tl.sum(dz * x, 0)[None, :], 0.0)
        inside = token < S
        at = dx_ptr + (batch * dx_stride_b + token.to(tl.int64) * dx_stride_s)[:, None] + cols[None, :]
        tl.store(at, dx.to(dx_ptr.dtype.element_ty), mask=inside[:, None] & col_mask[None, :])
    if WANT_DW:
        at = dw_ptr + (tl.program_id(0).to(tl.int64) * channels + cols)[None, :] * (W + 1) + tap[:, None]
        tl.store(at, dw, mask=(tap <= W)[:, None] & col_mask[None, :])


class _CausalConv(torch.autograd.Function):
    """Saves the inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, starts)
        return rounded(forward(x, weight, bias, starts), x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, starts = ctx.saved_tensors
        want_dw = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        dx, dw = backward(x, weight, bias, starts, dy, want_dw=want_dw)
        return (
            rounded(dx, x.dtype),
            dw[:, :-1].to(weight.dtype) if ctx.needs_input_grad[1] and dw is not None else None,
            dw[:, -1].to(bias.dtype) if ctx.needs_input_grad[2] and dw is not None else None,
            None,
        )


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> Tensor:
    """The output, by the kernel."""
    out = torch.empty(x.shape, dtype=store_dtype(x.dtype), device=x.device)
    if out.numel():
        x, (batch, length, channels) = _readable(x), x.shape
        with on_device_of(x):
            _forward_kernel[(batch * triton.cdiv(length, _TOKENS), triton.cdiv(channels, _CHANNELS))](
                x,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                None if starts is None else starts.contiguous(),
                out,
                *x.stride()[:2],
                _starts_stride(starts),
                length,
                channels,
                W=weight.shape[1],
                T=_TOKENS,
                BLOCK=_CHANNELS,
                ACC=triton_dtype(x.dtype),
                num_warps=4,
            )
    return out


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor | None,
    dy: Tensor,
    *,
    want_dw: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dx, and dweight with dbias beside it (C, W + 1), float32, or None. ``into``: takes
    dx, the channels of a token side by side.
    """
    batch, length, channels = x.shape
    width, device = weight.shape[1], x.device
    dx = torch.empty(x.shape, dtype=store_dtype(x.dtype), device=device) if into is None else into
    if not dx.numel():
        return dx, torch.zeros(channels, width + 1, device=device) if want_dw else None
    tiles = triton.cdiv(length, _TOKENS)
    blocks = triton.cdiv(tiles, 1 if interpreting() else max(1, _SHARES // batch)) if want_dw else 1
    shares = triton.cdiv(tiles, blocks)
    partial = torch.empty((batch * shares, channels * (width + 1)) if want_dw else (0,), device=device)
    x, dy = _readable(x), _readable(dy)
    with on_device_of(x):
        _backward_kernel[(batch * shares, triton.cdiv(channels, _CHANNELS))](
            dy,
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            None if starts is None else starts.contiguous(),
            dx,
            partial,
            *dy.stride()[:2],
            *x.stride()[:2],
            *dx.stride()[:2],
            _starts_stride(starts),
            length,
            channels,
            shares,
            blocks,
            WANT_DW=want_dw,
            W=width,
            TAPS=triton.next_power_of_2(width + 1),
            T=_TOKENS,
            BLOCK=_CHANNELS,
            ACC=triton_dtype(x.dtype),
            num_warps=4,
        )
    return dx, column_sums(partial).view(channels, width + 1) if want_dw else None


def _starts_stride(starts: Tensor | None) -> int:
    return 0 if starts is None or starts.shape[0] == 1 else int(starts.shape[1])


def _readable(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or a copy where the channels of a token lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] not in FILTER_WIDTHS:
        raise ValueError(f"expected x (B, S, C) and weight (C, 2 to 8), got {tuple(x.shape)}, {tuple(weight.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}")
    if bias is not None and bias.shape != x.shape[2:]:
        raise ValueError(f"the bias {tuple(bias.shape)} is not a number a channel of {x.shape[2]}")
    if starts is not None and (starts.shape not in ((1, x.shape[1]), x.shape[:2]) or starts.dtype != torch.int32):
        raise ValueError(f"starts {tuple(starts.shape)} in {starts.dtype} are not int32 (B or 1, S)")
