"""Attention for training: softcap, sinks, causal, sliding window, GQA, packed documents, padding; nothing of size S².

Legend: B batch, Hq query heads, Hkv key heads (Hq a multiple of Hkv), Sq queries, Sk keys, D head size.

    s = scale * q @ k.T                                 query head h reads key head h // (Hq / Hkv)
    s = softcap * tanh(s / softcap)  if softcap
    p = softmax(s where the mask lets the query see the key, -inf elsewhere)
    out = p @ v                                         0 for a query that sees nothing

With sinks, one learned number a query head, the softmax also counts a key that has this score and no value:

    p_j = exp(s_j) / (exp(sink) + sum over the keys seen of exp(s))

``attention_mask`` says what a query sees, ``attention_kernels`` holds the kernels, and
kernels/attention.md derives the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftkernels.attention_config import (
    AttentionSettings,
    AttentionTiles,
    choose_attention_backend,
    choose_tiles,
    loadable,
    padded_size,
    takes_descriptor,
)
from ftkernels.attention_kernels import attention_backward, attention_forward
from ftkernels.attention_mask import AttentionMask, TokenRanges
from ftkernels.device import BackendName, accumulate_dtype, gpu_of, without_autocast


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | TokenRanges,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: BackendName = "auto",
    tiles: AttentionTiles | None = None,
    kept: KeptOutput | None = None,
) -> Tensor:
    """Attention of ``q`` over ``k`` and ``v``; the module docstring has the formula.

    Args:
        q: (B, Hq, Sq, D), any strides; a view of (B, Sq, Hq * D) is read in place.
        k, v: (B, Hkv, Sk, D), in q's dtype. Sq < Sk means that the queries are the last Sq positions.
        mask: what each query sees. Given an ``AttentionMask``, its ``TokenRanges`` are made here; made once by the
            caller, they serve all layers of a model.
        scale: factor on q.k, positive: D ** -0.5 for most models, query_pre_attn_scalar ** -0.5 for Gemma-2.
        softcap: bound of the scores, 0 for none; Gemma-2 has 50.
        sinks: (Hq,), of any floating dtype; gpt-oss has them. A sink of -inf is none.
        backend: see ``ftkernels.attention_config.choose_attention``.
        tiles: instead of the table's tiles, for tuning and tests.
        kept: spares the second forward of a checkpoint this computation; see ``KeptOutput``. Only the kernels use it.

    Returns:
        (B, Hq, Sq, D) in q's dtype, laid out so that ``.transpose(1, 2).reshape(B, Sq, Hq * D)`` is a view. Under
        autocast all is done in autocast's dtype, as with torch's own attention.

    Raises:
        ValueError: shapes, dtypes or a mask that do not fit each other, an option outside its range, or
            ``backend="triton"`` where the kernels cannot run.
    """
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, scale, softcap)
    ranges = mask if isinstance(mask, TokenRanges) else mask.ranges(q.shape[2], k.shape[2], q.device)
    _check_ranges(ranges, q, k)
    _check_sinks(sinks, q)
    gpu = gpu_of(q.device)
    if not choose_attention_backend(q.device, gpu, q.dtype, q.shape[3], backend).is_triton:
        with without_autocast(q):
            return attention_reference(q, k, v, ranges, scale=scale, softcap=softcap, sinks=sinks)
    settings = AttentionSettings(float(scale), float(softcap), q.shape[3], q.shape[1] // k.shape[1], q.dtype)
    tiles = tiles or choose_tiles(gpu, q.dtype, padded_size(q.shape[3]))
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        loadable(q),
        loadable(k),
        loadable(v),
        None if sinks is None else sinks.contiguous(),
        ranges,
        settings,
        tiles,
        kept,
    )
    return out


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask | TokenRanges,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same function with all scores at once and torch's own autograd: (B, Hkv, Hq / Hkv, Sq, Sk) of them, in
    float32, or float64 for float64 inputs.
    """
    batch, heads, q_len, size = q.shape
    kv_heads, k_len = k.shape[1:3]
    acc = accumulate_dtype(q.dtype)
    seen = mask.dense() if isinstance(mask, TokenRanges) else mask.dense(q_len, k_len, q.device)
    seen = seen[:, :, None]
    grouped = q.to(acc).reshape(batch, kv_heads, heads // kv_heads, q_len, size)
    scores = grouped @ k.to(acc)[:, :, None].transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # A row that sees nothing would be softmax of -inf alone, NaN in value and gradient; the product makes it 0.
    scores = scores.masked_fill(~seen, torch.finfo(acc).min)
    if sinks is not None:
        sink = sinks.to(acc).view(1, kv_heads, heads // kv_heads, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    p = torch.softmax(scores, dim=-1)[..., :k_len] * seen
    out = p @ v.to(acc)[:, :, None]
    out = out.permute(0, 3, 1, 2, 4).reshape(batch, q_len, heads, size)
    return out.to(q.dtype).contiguous().transpose(1, 2)


class KeptOutput:
    """The output of one call of attention, kept for the second forward that an activation checkpoint makes.

    The same inputs give the same bits, so the second forward takes the output instead of computing it. Each output can
    be taken once; a third forward, for a second backward through a retained graph, computes it.

    Args:
        keep: Stores a contiguous tensor and returns a function that brings it back. Where it is stored is up to it.
    """

    __slots__ = ("_fetch", "_keep", "_lse")

    def __init__(self, keep: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._keep = keep
        self._fetch: Callable[[], Tensor] | None = None
        self._lse: Tensor | None = None

    def put(self, out: Tensor, lse: Tensor) -> None:
        """out (B, Hq, Sq, D), a view of (B, Sq, Hq, D); lse (B, Hq, Sq)."""
        self._fetch, self._lse = self._keep(out.transpose(1, 2)), lse

    def take(self) -> tuple[Tensor, Tensor] | None:
        """(out, lse) as they were put; None when nothing was, or when it was taken already."""
        fetch, lse = self._fetch, self._lse
        self._fetch = self._lse = None
        return None if fetch is None or lse is None else (fetch().transpose(1, 2), lse)


class _Attention(torch.autograd.Function):
    """Saves q, k, v, the output and one number a query (log-sum-exp); scores are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ranges: TokenRanges,
        settings: AttentionSettings,
        tiles: AttentionTiles,
        kept: KeptOutput | None,
    ) -> Any:
        known = None if kept is None else kept.take()
        if known is None:
            forward_tiles = tiles if takes_descriptor(q, k, v) else tiles.without_tma()
            out, lse = attention_forward(q, k, v, ranges, settings, forward_tiles.forward, sinks)
            if kept is not None:
                kept.put(out, lse)
        else:
            out, lse = known
        ctx.save_for_backward(q, k, v, out, lse, sinks, *ranges.tensors())
        ctx.settings, ctx.tiles = settings, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *bounds = ctx.saved_tensors
        d_out = loadable(d_out)
        tiles = ctx.tiles if takes_descriptor(q, k, v, d_out) else ctx.tiles.without_tma()
        wanted, trained = ctx.needs_input_grad[:3], sinks if ctx.needs_input_grad[3] else None
        saved = (q, k, v, out, lse)
        grads = attention_backward(saved, d_out, TokenRanges(*bounds), ctx.settings, tiles, wanted, trained)
        return *grads, None, None, None, None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in autocast's dtype where autocast is on: a norm over heads may have left q and k in float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.dtype.is_floating_point and x.dtype != torch.float64 else x for x in tensors)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.shape != k.shape:
        raise ValueError(f"expected q (B, Hq, Sq, D) and k, v (B, Hkv, Sk, D) of one shape; got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch and head size of q and k differ: {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"expected one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")


def _check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != (q.shape[1],) or not sinks.is_floating_point() or sinks.device != q.device:
        found = f"{tuple(sinks.shape)} in {sinks.dtype} on {sinks.device}"
        raise ValueError(f"expected a sink for each of {q.shape[1]} query heads on {q.device}; got {found}")


def _check_ranges(ranges: TokenRanges, q: Tensor, k: Tensor) -> None:
    if ranges.batch not in (1, q.shape[0]) or ranges.q_len != q.shape[2] or ranges.k_len != k.shape[2]:
        made = f"{ranges.batch} rows, {ranges.q_len} queries and {ranges.k_len} keys"
        raise ValueError(f"the mask is for {made}; q is {tuple(q.shape)}, k is {tuple(k.shape)}")
    if ranges.key_lo.device != q.device:
        raise ValueError(f"the mask is on {ranges.key_lo.device}, q on {q.device}")
