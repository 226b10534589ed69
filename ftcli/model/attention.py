"""Runs one call of attention on the backend that :func:`ftcli.plan.attention.choose_attention` names.

The registered implementation ``ftcli`` is what transformers' attention layers call. What a query sees comes with each
call as a :class:`ftcli.model.masks.CallMask`; nothing is stored on a module.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from ftkernels.attention import KeptOutput
from ftkernels.attention import attention as run_kernels
from ftkernels.attention_mask import AttentionMask, TokenRanges
from ftkernels.device import BackendName, dtype_name, gpu_of, interpreting
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ftcli.model.masks import CallMask, Documents, mask_for
from ftcli.plan.attention import AttentionCall, Backend, MaskKind, choose_attention

NAME = "ftcli"

_PRIORITIES: dict[str, list[SDPBackend]] = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}

#: Capped scores that plain torch holds at once, in bytes of float32.
_SCORE_BYTES = 256 * 2**20


class AttentionCache(Protocol):
    """A cache of keys and values as attention of one call knows it: :mod:`ftcli.generation.cache`."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        softcap: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Keeps the keys and values (B, Hkv, S, D) of layer number ``layer``.

        Returns:
            Attention's output (B, S, Hq, D); None where the queries see nothing but the call's own tokens, and
            attention is computed as without a cache.
        """
        ...


def ftcli_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CallMask | Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kernels: BackendName = "auto",
    kept: KeptOutput | None = None,
    documents: Documents | None = None,
    cached: AttentionCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, Hq, S, D), key and value (B, Hkv, S', D) -> (B, S, Hq, D).

    Args:
        attention_mask: What :func:`ftcli.model.masks.mask_for` made; a dense mask that a caller brought, boolean or
            additive, (B or 1, Hq or 1, S, S'); or None: causal, with ``sliding_window``, the queries at the end.
        s_aux: transformers' name of sinks, (Hq,); see :mod:`ftkernels.attention`.
        kept: Where our kernels run: spares a checkpoint's second forward theirs.
        documents: Documents that do not see each other, where the caller knows them; within what the mask lets be seen.
            Where ranks share rows, S and S' are this rank's tokens, and all of a row's are attended to.
        cached: Takes keys and values in generation, and answers where earlier ones are seen.

    Raises:
        ValueError: the mask was made for another window than this layer's, or for other lengths.
    """
    if cached is not None:
        layer: Any = module
        answer = cached.attend(
            layer.layer_idx, query, key, value, scaling=scaling, softcap=softcap or 0.0, window=sliding_window,
            sinks=s_aux,
        )  # fmt: skip
        if answer is not None:
            return answer, None
    if isinstance(attention_mask, CallMask):
        if documents is not None:
            attention_mask = documents.within(attention_mask)
        if attention_mask.sequence is not None:
            query, key, value = attention_mask.sequence.heads_of(query, key, value)
            s_aux = None if s_aux is None else attention_mask.sequence.sinks_of(s_aux)
        _check(attention_mask, query, key, sliding_window)
    call = AttentionCall(
        dtype=dtype_name(_compute_dtype(query)),
        head_dim=query.shape[-1],
        softcap=softcap or 0.0,
        windowed=sliding_window is not None and sliding_window < key.shape[2],
        mask=_kind(attention_mask, query, key),
        decoding=query.shape[2] == 1,
        dropout=dropout > 0.0,
        sinks=s_aux is not None,
    )
    backend = choose_attention(gpu_of(query.device), call, kernels, interpreted=interpreting()).backend
    if backend == "triton":
        ranges = _ranges(attention_mask, sliding_window)
        out = run_kernels(
            query, key, value, ranges, scale=scaling, softcap=call.softcap, sinks=s_aux, backend=kernels, kept=kept
        )
    elif backend == "eager":
        mask = _dense(attention_mask, query, key, sliding_window)
        out = _eager(query, key, value, mask, s_aux, scaling, call.softcap, dropout)
    else:
        plain = call.mask == "plain" and not call.windowed and not call.decoding
        dense = None if plain else _dense(attention_mask, query, key, sliding_window)
        out = _sdpa(query, key, value, dense, scaling, dropout, backend)
    by_token = out.transpose(1, 2).contiguous()
    if isinstance(attention_mask, CallMask) and attention_mask.sequence is not None:
        by_token = attention_mask.sequence.tokens_of(by_token)
    return by_token, None


def _check(mask: CallMask, query: Tensor, key: Tensor, window: int | None) -> None:
    """A mask applied to the wrong layers would train a wrong model in silence."""
    if not mask.irregular and mask.window != window:
        raise ValueError(f"a mask made for window {mask.window} reached a layer with window {window}")
    if (mask.q_len, mask.k_len) != (query.shape[2], key.shape[2]):
        made, got = f"{mask.q_len} queries and {mask.k_len} keys", f"{query.shape[2]} and {key.shape[2]}"
        raise ValueError(f"a mask made for {made} reached a layer with {got}")


def _compute_dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def _kind(mask: CallMask | Tensor | None, query: Tensor, key: Tensor) -> MaskKind:
    if isinstance(mask, Tensor) or query.shape[2] == 1:
        return "any"  # for one query a dense mask is a vector; looking into it would make the device wait
    if mask is None:
        return "plain" if query.shape[2] == key.shape[2] else "intervals"
    return mask.kind


def _ranges(mask: CallMask | Tensor | None, window: int | None) -> AttentionMask | TokenRanges:
    return mask.ranges if isinstance(mask, CallMask) else AttentionMask.causal_mask(window)


def _dense(mask: CallMask | Tensor | None, query: Tensor, key: Tensor, window: int | None) -> Tensor:
    if isinstance(mask, Tensor):
        return mask
    if mask is None:
        return AttentionMask.causal_mask(window).dense(query.shape[2], key.shape[2], query.device)
    return mask.dense


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float, backend: Backend
) -> Tensor:
    def call() -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    if backend not in _PRIORITIES:
        return call()
    with sdpa_kernel(_PRIORITIES[backend], set_priority=True):
        return call()


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Attention with a cap or sinks in plain torch, a block of queries at a time where all scores are too many to hold.

    A block's scores are formed again in backward.
    """
    per_query = query.shape[0] * query.shape[1] * key.shape[2] * 4
    rows = max(1, _SCORE_BYTES // per_query)
    if query.shape[2] <= rows:
        return _eager_block(query, key, value, mask, sinks, scaling, softcap, dropout)
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    again = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    blocks = []
    for start in range(0, query.shape[2], rows):
        block = query[:, :, start : start + rows]
        seen = mask if mask.shape[-2] == 1 else mask[..., start : start + rows, :]  # one row for all queries stays
        arguments = (block, key, value, seen, sinks, scaling, softcap, dropout)
        blocks.append(checkpoint(_eager_block, *arguments, use_reentrant=False) if again else _eager_block(*arguments))
    return torch.cat(blocks, dim=2)


def _eager_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    sinks: Tensor | None,
    scaling: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Scores in the inputs' dtype, cap, mask, softmax in float32: what transformers' own eager attention computes.

    The query heads that share a key head are taken as more queries of it, so that no key is copied.
    """
    batch, heads, q_len, size = query.shape
    kv_heads, k_len = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads * q_len, size)
    scores = (grouped @ key.transpose(2, 3)).view(batch, heads, q_len, k_len) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(batch, -1, q_len, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :k_len].to(value.dtype)
    weights = F.dropout(weights, dropout).view(batch, kv_heads, -1, k_len)
    return (weights @ value).view(batch, heads, q_len, size)


def register() -> None:
    """Adds the implementation ``ftcli`` to transformers' tables; nothing that is there is changed."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, ftcli_attention_forward)
    AttentionMaskInterface.register(NAME, mask_for)


def use(base: Any, name: str = NAME) -> str:
    """Has the text layers of a transformers model take another attention; returns the name of the one before.

    Towers of other kinds keep theirs: ours takes attention without a mask for causal.
    """
    register()
    text = base.config.get_text_config()
    before: str = text._attn_implementation
    base.set_attn_implementation(name if text is base.config else {"text_config": name})
    return before


def is_ours(base: Any) -> bool:
    """True if a transformers model's attention is this one, which takes document boundaries."""
    from transformers.masking_utils import AttentionMaskInterface

    interface = AttentionMaskInterface()
    name = base.config.get_text_config()._attn_implementation
    return name in interface and interface[name] is mask_for
