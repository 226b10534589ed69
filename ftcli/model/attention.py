"""Which attention backend serves a call: a pure function of the machine and the call, and the function that runs it.

The registered implementation ``ftcli`` is what transformers' attention layers call. Masks are made for each call by
transformers (``mask_for``) and never stored; without padding there is none, and causality and the window are the
kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "ftcli"

Backend = Literal["cudnn", "flash", "sdpa", "triton", "eager"]

_PRIORITIES: dict[str, list[SDPBackend]] = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
}


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What runs, and why, for the manifest."""

    backend: Backend
    reason: str


def choose_attention(
    *,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float,
    windowed: bool,
    masked: bool,
) -> AttentionChoice:
    """The backend of one attention call.

    Args:
        capability: The GPU's compute capability; None on a CPU.
        softcap: Cap on the scores; 0 for none.
        windowed: A sliding window shorter than the sequence is in force.
        masked: The call has an explicit mask (padding on the left, cached decoding).
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if softcap:
        if capability is not None and capability >= (8, 0) and not masked and half and head_dim <= 256:
            return AttentionChoice("triton", "scores are capped, which SDPA cannot do")
        return AttentionChoice("eager", "scores are capped, and the kernel needs capability 8.0 and half precision")
    if masked:
        return AttentionChoice("sdpa", "the call has an explicit mask")
    if capability is None or not half:
        return AttentionChoice("sdpa", "a CPU" if capability is None else f"{dtype} has no fused backend")
    if windowed:
        if capability >= (8, 0) and head_dim <= 256:
            return AttentionChoice("triton", "a sliding window is in force, which dense backends cannot skip")
        return AttentionChoice("sdpa", "a sliding window is in force: a masked call")
    if capability >= (9, 0):
        return AttentionChoice("cudnn", "dense causal attention on capability 9.0 or more")
    if capability >= (8, 0):
        return AttentionChoice("flash", "dense causal attention on capability 8.x")
    return AttentionChoice("sdpa", f"capability {capability[0]}.{capability[1]} has no flash attention")


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for anything else."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (B, Hq, S, D), key and value (B, Hkv, S', D) -> (B, S, Hq, D)."""
    window = sliding_window if sliding_window is not None and sliding_window < key.shape[2] else None
    choice = choose_attention(
        capability=device_capability(query.device),
        dtype=query.dtype,
        head_dim=query.shape[-1],
        softcap=softcap or 0.0,
        windowed=window is not None,
        masked=attention_mask is not None or query.shape[2] != key.shape[2] or dropout > 0.0,
    )
    if choice.backend == "triton":
        out = _triton(query, key, value, scaling, window, softcap or 0.0)
    elif choice.backend == "eager":
        out = _eager(query, key, value, attention_mask, scaling, window, softcap or 0.0, dropout)
    else:
        mask = attention_mask
        if mask is None and (window is not None or query.shape[2] != key.shape[2]):
            mask = causal_mask(query, key, window)
        out = _sdpa(query, key, value, mask, scaling, dropout, choice.backend)
    return out.transpose(1, 2).contiguous(), None


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
            is_causal=mask is None and query.shape[2] > 1,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    if backend not in _PRIORITIES:
        return call()
    with sdpa_kernel(_PRIORITIES[backend], set_priority=True):
        return call()


def _triton(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None, softcap: float) -> Tensor:
    from ftkernels.attention import attention
    from ftkernels.attention_mask import AttentionMask

    return attention(query, key, value, AttentionMask(causal=True, window=window), scale=scaling, softcap=softcap)


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    window: int | None,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Scores in the inputs' dtype, cap, mask, softmax in float32: what transformers' own eager attention computes."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    visible = mask if mask is not None else causal_mask(query, key, window)
    if visible.dtype == torch.bool:
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    else:
        scores = scores + visible
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def causal_mask(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """(1, 1, S, S') bool, True where ``0 <= q - k < window``; the last query stands at the last key."""
    offset = key.shape[2] - query.shape[2]
    q = torch.arange(query.shape[2], device=query.device)[:, None] + offset
    k = torch.arange(key.shape[2], device=query.device)[None, :]
    visible = k <= q
    if window is not None:
        visible = visible & (q - k < window)
    return visible[None, None]


def mask_for(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask interface: None for full sequences without padding, else SDPA's boolean mask.

    The kernels and :func:`attention_forward` know causality and the window themselves, so the common case of training
    holds nothing of size S². ``allow_is_causal_skip`` is transformers' word that nothing else (packed documents, a
    caller's own mask function) has been asked for.
    """
    from transformers.masking_utils import sdpa_mask

    whole = kwargs.get("q_length") == kwargs.get("kv_length")
    if whole and kwargs.get("attention_mask") is None and kwargs.get("allow_is_causal_skip", False):
        return None
    mask: Tensor | None = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    return mask


def register() -> None:
    """Adds the implementation ``ftcli`` to transformers' tables; nothing that is there is changed."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_for)
