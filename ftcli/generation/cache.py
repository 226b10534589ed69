"""The key-value cache, and how attention of one call reads and writes it.

A call reaches the attention of each layer as the keyword argument ``cached``
(:class:`ftcli.model.attention.AttentionCache`); no module holds the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from ftkernels.decode_attention import Pages, decode_attention
from ftkernels.device import BackendName
from ftkernels.limits import CACHE_PAGE
from torch import Tensor

from ftcli.facts.generation import CacheShape


class Cache:
    """Pages of keys and values of all layers, (layers, pages, heads, positions, features) each."""

    def __init__(self, shape: CacheShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        sizes = (shape.layers, pages, shape.key_heads, CACHE_PAGE, shape.head_dim)
        self.keys = torch.empty(sizes, dtype=dtype, device=device)
        self.values = torch.empty(sizes, dtype=dtype, device=device)

    def layer(self, index: int) -> Pages:
        """One layer's pages."""
        return Pages(self.keys[index], self.values[index])

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The content of some pages into others, in all layers."""
        if not sources:
            return
        into, out_of = (torch.tensor(pages, device=self.keys.device) for pages in (targets, sources))
        for pool in (self.keys, self.values):
            pool.index_copy_(1, into, pool.index_select(1, out_of))


@dataclass(frozen=True, slots=True)
class Prefill:
    """A call over whole prompts, (1, S): keys and values are kept, and attention goes on as in training.

    ``page`` and ``spot``: (S,) int64, where each token's are written.
    """

    cache: Cache
    page: Tensor
    spot: Tensor

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
    ) -> None:
        """As :class:`ftcli.model.attention.AttentionCache` says: attention is left to the caller."""
        pages = self.cache.layer(layer)
        for pool, new in ((pages.keys, key), (pages.values, value)):
            pool[self.page, :, self.spot] = new[0].transpose(0, 1).to(pool.dtype)


@dataclass(frozen=True, slots=True)
class Decode:
    """A call of one token a row, (B, 1), against the cache.

    ``table``: (B, T) int32; ``lengths``: (B,) int32, with the new token; ``longest``: a bound on them, where known.
    """

    cache: Cache
    table: Tensor
    lengths: Tensor
    longest: int | None = None
    backend: BackendName = "auto"

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
    ) -> Tensor:
        """As :class:`ftcli.model.attention.AttentionCache` says: (B, 1, heads, features)."""
        pages = self.cache.layer(layer)
        q, k, v = (tensor[:, :, 0].to(pages.keys.dtype) for tensor in (query, key, value))
        out = decode_attention(
            q, k, v, pages, self.table, self.lengths, scale=scaling, softcap=softcap, window=window,
            longest=self.longest, backend=self.backend,
        )  # fmt: skip
        return out[:, None]
