"""One new token a row of a gated delta net: the convolution and the delta rule, on states in pools that stay in place.

Legend: R rows, N slots of a pool, C channels, W width of the convolution, Hk key heads, Hv value heads, K and V head
sizes. Row r's states are those of slot ``slots[r]``; a negative slot says that the row is empty: nothing is read or
written for it, and its output is zero. No two rows may have one slot.

    conv_step:   window = [the slot's W - 1 inputs, x]     y = silu(bias + sum over w of weight_w window_w)
                 the slot's inputs <- window without its first
    delta_step:  M <- exp(g) M      M <- M + beta k~ (v - M^T k~)^T      o = M^T q~

with q~ and k~ as in ``ftkernels.delta_rule``.

A launch reads where its states lie from ``slots`` on the device, so a CUDA graph of it serves other slots. States and
arithmetic are float32; nothing depends on other rows. There is no backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ftkernels.delta_rule_forward import NORM_EPS
from ftkernels.device import (
    BackendName,
    choose_backend,
    interpreting,
    on_device_of,
    rounded,
    store_dtype,
)
from ftkernels.primitives import sigmoid

#: Channels of a program of the convolution, and values of a program of the delta rule.
_CHANNELS, _VALUES = 256, 32


def conv_step(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor, *, backend: BackendName = "auto"
) -> Tensor:
    """(R, C) in x's dtype; ``pool`` is updated in place.

    Args:
        x: (R, C), any strides.
        weight: (C, W). bias: (C,) or None.
        pool: (N, C, W - 1), contiguous, float32 or x's dtype, the latest input last.
        slots: (R,) int32, contiguous.

    Raises:
        ValueError: shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 2 or pool.shape[1:] != (x.shape[1], weight.shape[1] - 1):
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and pool {tuple(pool.shape)} do not fit")
    _check_slots(slots, x.shape[0], pool)
    if not choose_backend(x.device, backend).is_triton:
        return conv_step_reference(x, weight, bias, pool, slots)
    return conv_triton(x, weight, bias, pool, slots)


def conv_triton(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor) -> Tensor:
    """``conv_step`` by its kernel."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=store_dtype(x.dtype), device=x.device)
    if out.numel():
        with on_device_of(x):
            _conv_kernel[(x.shape[0], triton.cdiv(x.shape[1], _CHANNELS))](
                x,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                pool,
                slots,
                out,
                x.stride(0),
                x.shape[1],
                W=weight.shape[1],
                BLOCK=_CHANNELS,
                num_warps=4,
            )
    return rounded(out, x.dtype)


def conv_step_reference(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, slots: Tensor) -> Tensor:
    """The same in plain torch; waits for the device. float64 pools are computed in float64."""
    out, acc = torch.zeros_like(x), torch.promote_types(pool.dtype, torch.float32)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            window = torch.cat([pool[slot].to(acc), x[row, :, None].to(acc)], 1)
            z = (window * weight.to(acc)).sum(1) + (0.0 if bias is None else bias.to(acc))
            pool[slot] = window[:, 1:].to(pool.dtype)
            out[row] = (z * torch.sigmoid(z)).to(x.dtype)
    return out


@triton.jit
def _conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    pool_ptr,
    slots_ptr,
    out_ptr,
    x_stride,
    channels,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < channels
    slot = tl.load(slots_ptr + row).to(tl.int64)
    live = mask & (slot >= 0)
    x = tl.load(x_ptr + row * x_stride + cols, mask=live, other=0.0).to(tl.float32)
    z = x * tl.load(weight_ptr + cols * W + W - 1, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    at = pool_ptr + (slot * channels + cols) * (W - 1)
    for w in tl.static_range(W - 1):
        old = tl.load(at + w, mask=live, other=0.0).to(tl.float32)
        z += old * tl.load(weight_ptr + cols * W + w, mask=mask, other=0.0).to(tl.float32)
        if w > 0:  # each thread owns its channels: what it has read it may write over
            tl.store(at + w - 1, old.to(pool_ptr.dtype.element_ty), mask=live)
    tl.store(at + W - 2, x.to(pool_ptr.dtype.element_ty), mask=live)
    y = tl.where(live, z * sigmoid(z), 0.0)
    tl.store(out_ptr + row * channels + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


def delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    *,
    normalize: bool = True,
    scale: float | None = None,
    backend: BackendName = "auto",
) -> Tensor:
    """(R, Hv, V) in v's dtype; ``pool`` is updated in place.

    Args:
        q, k: (R, Hk, K). v: (R, Hv, V). Any strides.
        g, beta: (R, Hv), as ``ftkernels.delta_rule.delta_rule`` takes them, any strides.
        pool: (N, Hv, K, V), float32, contiguous.
        slots: (R,) int32, contiguous.
        normalize: whether q and k are divided by their norms.
        scale: of q; None is K^-0.5.

    Raises:
        ValueError: shapes that do not fit.
    """
    rows, heads, values = v.shape
    if k.shape != q.shape or heads % q.shape[1] or g.shape != (rows, heads) or beta.shape != g.shape:
        raise ValueError(f"q {tuple(q.shape)}, v {tuple(v.shape)} and g {tuple(g.shape)} do not fit")
    if pool.shape[1:] != (heads, q.shape[2], values):
        raise ValueError(f"the pool {tuple(pool.shape)} is not (N, Hv, K, V) of {(heads, q.shape[2], values)}")
    _check_slots(slots, rows, pool)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not choose_backend(v.device, backend).is_triton:
        return delta_step_reference(q, k, v, g, beta, pool, slots, normalize=normalize, scale=scale)
    return delta_triton(q, k, v, g, beta, pool, slots, normalize, scale)


def delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    normalize: bool,
    scale: float,
) -> Tensor:
    """``delta_step`` by its kernel."""
    (_, heads, values), (q, k, v) = v.shape, (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    out = torch.empty(v.shape, dtype=store_dtype(v.dtype), device=v.device)
    block = min(triton.next_power_of_2(values), 128 if interpreting() else _VALUES)
    if out.numel():
        with on_device_of(v):
            _delta_kernel[(v.shape[0] * heads, triton.cdiv(values, block))](
                q,
                k,
                v,
                g,
                beta,
                pool,
                slots,
                out,
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                *g.stride(),
                *beta.stride(),
                heads,
                scale,
                NORM_EPS,
                NORMALIZE=normalize,
                GROUP=heads // q.shape[1],
                K=q.shape[2],
                V=values,
                BLOCK_K=triton.next_power_of_2(q.shape[2]),
                BLOCK_V=block,
                num_warps=4,
            )
    return rounded(out, v.dtype)


def delta_step_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    slots: Tensor,
    *,
    normalize: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The same in plain torch; waits for the device. float64 pools are computed in float64."""
    out, group = torch.zeros_like(v), v.shape[1] // q.shape[1]
    q, k = (t.to(pool.dtype).repeat_interleave(group, dim=1) for t in (q, k))
    if normalize:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            state = pool[slot] * g[row].to(pool.dtype).exp()[:, None, None]
            missing = v[row].to(pool.dtype) - torch.einsum("hkv,hk->hv", state, k[row])
            pool[slot] = state + torch.einsum("hk,hv->hkv", k[row] * beta[row, :, None].to(pool.dtype), missing)
            out[row] = torch.einsum("hkv,hk->hv", pool[slot], q[row]).to(v.dtype)
    return out


@triton.jit
def _delta_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    pool_ptr,
    slots_ptr,
    out_ptr,
    q_stride_r,
    q_stride_h,
    k_stride_r,
    k_stride_h,
    v_stride_r,
    v_stride_h,
    g_stride_r,
    g_stride_h,
    b_stride_r,
    b_stride_h,
    heads,
    scale,
    eps,
    NORMALIZE: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    keys, values = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    key_mask, value_mask = (keys < K) & (slot >= 0), (values < V) & (slot >= 0)
    key_head = head // GROUP
    q = tl.load(q_ptr + row * q_stride_r + key_head * q_stride_h + keys, mask=key_mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + row * k_stride_r + key_head * k_stride_h + keys, mask=key_mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_stride_r + head * v_stride_h + values, mask=value_mask, other=0.0).to(tl.float32)
    if NORMALIZE:
        q = q / tl.sqrt(tl.sum(q * q, 0) + eps)
        k = k / tl.sqrt(tl.sum(k * k, 0) + eps)
    decay = tl.exp(tl.load(g_ptr + row * g_stride_r + head * g_stride_h).to(tl.float32))
    beta = tl.load(beta_ptr + row * b_stride_r + head * b_stride_h).to(tl.float32)
    at = pool_ptr + (slot * heads + head) * (K * V) + keys[:, None] * V + values[None, :]
    mask = key_mask[:, None] & value_mask[None, :]
    state = tl.load(at, mask=mask, other=0.0) * decay
    added = beta * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * added[None, :]
    tl.store(at, state, mask=mask)
    out = tl.where(value_mask, tl.sum(state * q[:, None], 0) * scale, 0.0)
    tl.store(out_ptr + (row * heads + head) * V + values, out.to(out_ptr.dtype.element_ty), mask=values < V)


def _check_slots(slots: Tensor, rows: int, pool: Tensor) -> None:
    if slots.shape != (rows,) or slots.dtype != torch.int32 or not pool.is_contiguous():
        raise ValueError(f"slots {tuple(slots.shape)} in {slots.dtype} are not int32 ({rows},), or the pool has gaps")
