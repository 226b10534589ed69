"""Heads of multi-head latent attention (arXiv 2405.04434, §2.1), put together from what its projections give.

Legend: B batch, S sequence, H heads, N features of a head without rotation, R rotated ones, V features of a value;
D = N + R. For each token and head:

    q = [q_n | rope(q_r)]         of q (H * D), head by head
    k = [k_n | rope(k_r)]         k_n of kv (H * (N + V)), k_r (R) the same for all heads
    v = [v | 0]                   of kv; zeros up to D, so that attention whose heads have one size takes it

Backward: the rotation's inverse, and for k_r the sum over the heads. cos and sin are given per token, as to
``ftkernels.rope``; the arithmetic is float32 with one rounding at the end. Saved: cos and sin.

Plain torch would read and write q and k twice each way, the pieces and what they are joined to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.device import BackendName, choose_backend, on_device_of, rounded, store_dtype, triton_dtype
from ftkernels.limits import RopeLayout
from ftkernels.rope import (
    apply_rope_reference,
    features,
    load_features,
    load_rotation,
    rotate,
    rotation_arguments,
    store_features,
)

#: Heads that a program has in its registers at once.
_HEADS = 4


class LatentSizes(NamedTuple):
    """H, N, R and V of the module docstring."""

    heads: int
    plain: int
    rotated: int
    value: int

    @property
    def head(self) -> int:
        """D."""
        return self.plain + self.rotated


def latent_heads(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: LatentSizes,
    *,
    layout: RopeLayout = "halves",
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, S, D), each by token in memory.

    Args:
        q: (B, S, H * D), any strides with a contiguous last dimension.
        kv: (B, S, H * (N + V)), likewise.
        shared: (B, S, R), the keys' part that is rotated, likewise.
        cos: (B, S, R) or (1, S, R), as transformers' rotary embedding gives them.
        sin: as ``cos``.
        layout: the features that are turned together; see ``ftkernels.rope``.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(q, kv, shared, cos, sin, sizes)
    if not choose_backend(q.device, backend).is_triton:
        return latent_heads_reference(q, kv, shared, cos, sin, sizes, layout=layout)
    made: tuple[Tensor, Tensor, Tensor] = _LatentHeads.apply(q, kv, shared, cos, sin, sizes, layout == "pairs")  # type: ignore[no-untyped-call]
    return made


def latent_heads_reference(
    q: Tensor,
    kv: Tensor,
    shared: Tensor,
    cos: Tensor,
    sin: Tensor,
    sizes: LatentSizes,
    *,
    layout: RopeLayout = "halves",
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, differentiable."""
    q_n, q_r = q.unflatten(-1, (sizes.heads, sizes.head)).split([sizes.plain, sizes.rotated], dim=-1)
    k_n, v = kv.unflatten(-1, (sizes.heads, sizes.plain + sizes.value)).split([sizes.plain, sizes.value], dim=-1)
    q_r, k_r = apply_rope_reference(q_r.transpose(1, 2), shared[:, None], cos, sin, layout=layout)
    k_r = k_r.transpose(1, 2).expand(-1, -1, sizes.heads, -1)
    v = torch.nn.functional.pad(v, (0, sizes.head - sizes.value))
    made = torch.cat((q_n, q_r.transpose(1, 2)), dim=-1), torch.cat((k_n, k_r), dim=-1), v.contiguous()
    return made[0].transpose(1, 2), made[1].transpose(1, 2), made[2].transpose(1, 2)


@triton.jit
def _forward_kernel(
    q_ptr,
    q_batch,
    q_token,
    kv_ptr,
    kv_batch,
    kv_token,
    shared_ptr,
    shared_batch,
    shared_token,
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    out_q_ptr,
    out_k_ptr,
    out_v_ptr,
    S,
    heads,
    N: tl.constexpr,
    HALF: tl.constexpr,
    V: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program a token: what its heads share is read and turned once."""
    D: tl.constexpr = N + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    b = token // S
    s = token % S
    lane = tl.arange(0, BLOCK_R)[None, :]
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, token, S, lane, lane < HALF,
        HALF, HALF, PAIRS, ACC,
    )  # fmt: skip
    r, r_ok = features(HALF, HALF, PAIRS, BLOCK_R)
    r, r_ok = r[None, :], r_ok[None, :]
    k1, k2 = load_features(shared_ptr + b * shared_batch + s * shared_token + r, HALF, r_ok, PAIRS, ACC)
    k1, k2 = rotate(k1, k2, c1, c2, s1, s2, False)
    k1, k2 = tl.broadcast_to(k1, (HEADS, BLOCK_R)), tl.broadcast_to(k2, (HEADS, BLOCK_R))
    n = tl.arange(0, BLOCK_N)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    q_at = q_ptr + b * q_batch + s * q_token
    kv_at = kv_ptr + b * kv_batch + s * kv_token
    for first in range(0, heads, HEADS):
        h = first + tl.arange(0, HEADS)[:, None]
        ok = h < heads
        some = ok & (n < N)
        turned = ok & r_ok
        out = (token * heads + h) * D
        x = tl.load(q_at + h * D + n, mask=some, other=0.0)
        tl.store(out_q_ptr + out + n, x.to(out_q_ptr.dtype.element_ty), mask=some)
        x1, x2 = load_features(q_at + h * D + N + r, HALF, turned, PAIRS, ACC)
        y1, y2 = rotate(x1, x2, c1, c2, s1, s2, False)
        store_features(out_q_ptr + out + N + r, HALF, y1, y2, turned, PAIRS)
        x = tl.load(kv_at + h * (N + V) + n, mask=some, other=0.0)
        tl.store(out_k_ptr + out + n, x.to(out_k_ptr.dtype.element_ty), mask=some)
        store_features(out_k_ptr + out + N + r, HALF, k1, k2, turned, PAIRS)
        x = tl.load(kv_at + h * (N + V) + N + d, mask=ok & (d < V), other=0.0)
        tl.store(out_v_ptr + out + d, x.to(out_v_ptr.dtype.element_ty), mask=ok & (d < D))


@triton.jit
def _backward_kernel(
    dq_ptr,
    dq_batch,
    dq_head,
    dq_token,
    dk_ptr,
    dk_batch,
    dk_head,
    dk_token,
    dv_ptr,
    dv_batch,
    dv_head,
    dv_token,
    cos_ptr,
    cos_batch,
    cos_token,
    sin_ptr,
    sin_batch,
    sin_token,
    out_q_ptr,
    out_kv_ptr,
    out_shared_ptr,
    S,
    heads,
    N: tl.constexpr,
    HALF: tl.constexpr,
    V: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    ACC: tl.constexpr,
):
    """One program a token, which adds up the heads' gradients of what they share, in their order."""
    D: tl.constexpr = N + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    b = token // S
    s = token % S
    lane = tl.arange(0, BLOCK_R)[None, :]
    c1, c2, s1, s2 = load_rotation(
        cos_ptr, cos_batch, cos_token, sin_ptr, sin_batch, sin_token, token, S, lane, lane < HALF,
        HALF, HALF, PAIRS, ACC,
    )  # fmt: skip
    r, r_ok = features(HALF, HALF, PAIRS, BLOCK_R)
    r, r_ok = r[None, :], r_ok[None, :]
    n = tl.arange(0, BLOCK_N)[None, :]
    d = tl.arange(0, BLOCK_D)[None, :]
    dq_at = dq_ptr + b * dq_batch + s * dq_token
    dk_at = dk_ptr + b * dk_batch + s * dk_token
    dv_at = dv_ptr + b * dv_batch + s * dv_token
    sum1 = tl.zeros((1, BLOCK_R), ACC)
    sum2 = tl.zeros((1, BLOCK_R), ACC)
    for first in range(0, heads, HEADS):
        h = first + tl.arange(0, HEADS)[:, None]
        ok = h < heads
        some = ok & (n < N)
        turned = ok & r_ok
        row = token * heads + h
        h = h.to(tl.int64)
        x = tl.load(dq_at + h * dq_head + n, mask=some, other=0.0)
        tl.store(out_q_ptr + row * D + n, x.to(out_q_ptr.dtype.element_ty), mask=some)
        x1, x2 = load_features(dq_at + h * dq_head + N + r, HALF, turned, PAIRS, ACC)
        y1, y2 = rotate(x1, x2, c1, c2, s1, s2, True)
        store_features(out_q_ptr + row * D + N + r, HALF, y1, y2, turned, PAIRS)
        x = tl.load(dk_at + h * dk_head + n, mask=some, other=0.0)
        tl.store(out_kv_ptr + row * (N + V) + n, x.to(out_kv_ptr.dtype.element_ty), mask=some)
        x1, x2 = load_features(dk_at + h * dk_head + N + r, HALF, turned, PAIRS, ACC)
        sum1 += tl.sum(x1, axis=0)[None, :]
        sum2 += tl.sum(x2, axis=0)[None, :]
        value = ok & (d < V)
        x = tl.load(dv_at + h * dv_head + d, mask=value, other=0.0)
        tl.store(out_kv_ptr + row * (N + V) + N + d, x.to(out_kv_ptr.dtype.element_ty), mask=value)
    y1, y2 = rotate(sum1, sum2, c1, c2, s1, s2, True)
    store_features(out_shared_ptr + token * 2 * HALF + r, HALF, y1, y2, r_ok, PAIRS)


def _options(sizes: LatentSizes, dtype: torch.dtype, *, pairs: bool) -> dict[str, Any]:
    half = sizes.rotated // 2
    return {
        "N": sizes.plain,
        "HALF": half,
        "V": sizes.value,
        "PAIRS": pairs,
        "BLOCK_N": triton.next_power_of_2(sizes.plain),
        "BLOCK_R": triton.next_power_of_2(half),
        "BLOCK_D": triton.next_power_of_2(sizes.head),
        "HEADS": _HEADS,
        "ACC": triton_dtype(dtype),
        "num_warps": 4,
    }


def _launch_forward(
    q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, sizes: LatentSizes, *, pairs: bool
) -> list[Tensor]:
    """q, k and v, each (B, S, H, D) and contiguous."""
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in (q, kv, shared)]
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    shape = (*q.shape[:2], sizes.heads, sizes.head)
    out = [torch.empty(shape, dtype=store_dtype(t.dtype), device=q.device) for t in (q, kv, kv)]
    if q.shape[0] * q.shape[1]:
        strides = [(t, *t.stride()[:2]) for t in given]
        with on_device_of(q):
            _forward_kernel[(q.shape[0] * q.shape[1],)](
                *strides[0], *strides[1], *strides[2], *rotation_arguments(cos, sin), *out, q.shape[1], sizes.heads,
                **_options(sizes, q.dtype, pairs=pairs),
            )  # fmt: skip
    return [rounded(made, t.dtype) for made, t in zip(out, (q, kv, kv), strict=True)]


def _launch_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    sizes: LatentSizes,
    dtype: torch.dtype,
    *,
    pairs: bool,
) -> list[Tensor]:
    """Gradients of q, kv and the shared part, contiguous, in ``dtype``. ``grads``: (B, H, S, D)."""
    given = [t if t.stride(-1) == 1 else t.contiguous() for t in grads]
    cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
    batch, heads, seq_len, _ = given[0].shape
    widths = heads * sizes.head, heads * (sizes.plain + sizes.value), sizes.rotated
    out = [torch.empty((batch, seq_len, w), dtype=store_dtype(dtype), device=given[0].device) for w in widths]
    if batch * seq_len:
        strides = [(t, *t.stride()[:3]) for t in given]
        with on_device_of(given[0]):
            _backward_kernel[(batch * seq_len,)](
                *strides[0], *strides[1], *strides[2], *rotation_arguments(cos, sin), *out, seq_len, heads,
                **_options(sizes, dtype, pairs=pairs),
            )  # fmt: skip
    return [rounded(made, dtype) for made in out]


class _LatentHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, sizes: LatentSizes, pairs: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.pairs, ctx.dtypes = sizes, pairs, (q.dtype, kv.dtype, shared.dtype)
        return tuple(x.transpose(1, 2) for x in _launch_forward(q, kv, shared, cos, sin, sizes, pairs=pairs))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        made = _launch_backward((dq, dk, dv), cos, sin, ctx.sizes, ctx.dtypes[0], pairs=ctx.pairs)
        return *(x.to(dtype) for x, dtype in zip(made, ctx.dtypes, strict=True)), None, None, None, None


def _check(q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, sizes: LatentSizes) -> None:
    heads, plain, rotated, value = sizes
    if rotated % 2 or min(heads, plain, rotated, value) < 1 or value > sizes.head:
        raise ValueError(f"no heads of {plain} features, {rotated} rotated ones and values of {value}")
    wanted = heads * sizes.head, heads * (plain + value), rotated
    found = [tuple(t.shape) for t in (q, kv, shared)]
    if any(len(x) != 3 or x != (*found[0][:2], w) for x, w in zip(found, wanted, strict=True)):
        listed = ", ".join(map(str, found))
        raise ValueError(f"expected (B, S, features) of {', '.join(map(str, wanted))} features, got {listed}")
    if cos.shape != sin.shape or cos.dim() != 3 or cos.shape[0] not in (1, q.shape[0]) or cos.shape[1] != q.shape[1]:
        shapes = f"{tuple(cos.shape)}, {tuple(sin.shape)}"
        raise ValueError(f"expected cos and sin (B or 1, S, {rotated}) for q {found[0]}, got {shapes}")
    if cos.shape[-1] != rotated:
        raise ValueError(f"expected cos of {rotated} features, got {cos.shape[-1]}")
