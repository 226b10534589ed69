"""The key-value cache: pages on the device, which of them are free, and attention of one call on them.

Pages are counted on the host alone: lengths are known there without asking the device. A call reaches the attention of
each layer as the keyword argument ``cached`` (:class:`ftcli.model.attention.AttentionCache`); no module holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from ftkernels.decode_attention import Pages, decode_attention
from ftkernels.device import BackendName
from ftkernels.limits import CACHE_PAGE
from torch import Tensor

from ftcli.facts.generation import CacheShape


class PagePool:
    """Pages 1 to ``count - 1``, each in use by any number of sequences. Page 0 is reserved: empty rows point at it."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, 0, -1))
        self._users = [0] * count

    @property
    def free(self) -> int:
        """Pages that nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages for one user. Raises ValueError when there are not so many."""
        if count > len(self._free):
            raise ValueError(f"{count} pages asked for, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each page."""
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One user less; a page without users is free. Raises ValueError for a page that has none."""
        for page in pages:
            if self._users[page] == 0:
                raise ValueError(f"page {page} is free already")
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)


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
    """A call over whole prompts, (1, S): keys and values are kept, and attention is computed as in training.

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
        sinks: Tensor | None,
    ) -> None:
        """Keeps keys and values (:class:`ftcli.model.attention.AttentionCache`); attention is left to the caller."""
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
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention against the cache (:class:`ftcli.model.attention.AttentionCache`): (B, 1, heads, features)."""
        pages = self.cache.layer(layer)
        q, k, v = (tensor[:, :, 0].to(pages.keys.dtype) for tensor in (query, key, value))
        out = decode_attention(
            q, k, v, pages, self.table, self.lengths, scale=scaling, softcap=softcap, window=window,
            sinks=sinks, longest=self.longest, backend=self.backend,
        )  # fmt: skip
        return out[:, None]
