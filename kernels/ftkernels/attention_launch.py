"""Shared host code of the attention kernels' launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ftkernels.attention_config import AttentionTile
from ftkernels.attention_mask import TokenRanges
from ftkernels.device import interpreting, store_dtype, triton_store_dtype

# No tile is longer.
_MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Constants of one call's forward and backward, compiled into the kernels."""

    scale: float
    softcap: float
    head_size: int
    group: int
    dtype: torch.dtype


def padded_size(head_size: int) -> int:
    """The power of two that holds ``head_size``: blocks of Triton have no other widths."""
    return max(16, int(triton.next_power_of_2(head_size)))


def common_constants(settings: AttentionSettings, tile: AttentionTile, ranges: TokenRanges) -> dict[str, Any]:
    """The constexpr arguments, and the launch options, that all kernels take."""
    return {
        "GROUP": settings.group,
        "SCALE": settings.scale,
        "SOFTCAP": settings.softcap,
        "FAST_TANH": settings.dtype != torch.float32 and not interpreting(),
        "D": settings.head_size,
        "BLOCK_D": padded_size(settings.head_size),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "CD": triton_store_dtype(settings.dtype),
        "PRECISION": "ieee",
        "TMA": tile.tma,
        "HOLES": ranges.key_holes is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def strides(*tensors: Tensor) -> list[int]:
    """Batch, head and sequence strides of (B, H, S, D) tensors, one after the other."""
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1, 2)]


def token_major_like(tensor: Tensor) -> Tensor:
    """An empty (B, H, S, D) for an output: a view of a contiguous (B, S, H, D), the layout that projections read."""
    batch, heads, length, size = tensor.shape
    dtype = store_dtype(tensor.dtype)
    return torch.empty((batch, length, heads, size), dtype=dtype, device=tensor.device).transpose(1, 2)


def loadable(tensor: Tensor) -> Tensor:
    """``tensor`` as the kernels can address it: itself, or a copy where its last dimension has another stride than 1,
    or where rows of one tile lie further apart than int32 reaches (offsets between tiles are int64).
    """
    far = tensor.stride(2) * _MOST_ROWS >= 2**31
    return tensor.contiguous() if tensor.stride(-1) != 1 or far else tensor


def takes_descriptor(*tensors: Tensor) -> bool:
    """True when tensor memory access (TMA) can address all of the (B, H, S, D) tensors: Hopper wants 16-byte steps."""
    return all(
        tensor.numel() > 0
        and tensor.data_ptr() % 16 == 0
        and padded_size(tensor.shape[-1]) == tensor.shape[-1]
        and all(s > 0 and s * tensor.element_size() % 16 == 0 for s in tensor.stride()[:-1])
        for tensor in tensors
    )


def tile_source(tensor: Tensor, rows: int, tma: bool) -> Tensor | TensorDescriptor:
    """The source of ``load_tile``: the tensor's pointer, or a descriptor of tiles of ``rows`` rows of one head."""
    if not tma:
        return tensor
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, tensor.shape[-1]])
