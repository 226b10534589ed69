"""The cache of layers: pages of keys and values, or of latents that both come from, and slots with
the states of delta nets; which of them are free; and what the layers of one call do with them.

Pages and slots are counted on the host alone: lengths are known there without asking the device. A call reaches each
layer as the keyword argument ``cached`` (:class:`ftcli.model.attention.AttentionCache`,
:class:`ftcli.model.layers.LatentCache` and :class:`ftcli.model.layers.StateCache`); no module holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from ftkernels.causal_conv import causal_conv, inputs_at
from ftkernels.decode_attention import Pages, SharedPages, decode_attention
from ftkernels.delta_gates import delta_gates, gated_norm
from ftkernels.delta_net import NetSizes, NetWeights, heads_of, parts_of
from ftkernels.delta_rule import delta_rule_ends
from ftkernels.delta_step import conv_step, delta_step
from ftkernels.device import BackendName
from ftkernels.latent_decode import decode_latents
from ftkernels.limits import CACHE_PAGE
from torch import Tensor

from ftcli.facts.generation import CacheShape, EngineLayout, slots_of

T = TypeVar("T")


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


class SlotPool:
    """Slots 0 to ``count - 1``, each in use by one sequence or none. Without any, as where layers have no states,
    everyone is given :data:`NO_SLOT`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)

    def take(self) -> int:
        """A slot for one sequence. Raises ValueError when all are in use."""
        if not self._count:
            return NO_SLOT
        if not self._free:
            raise ValueError(f"all of {self._count} states are in use")
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Frees a slot. Raises ValueError for one that is free."""
        if slot == NO_SLOT:
            return
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.append(slot)


#: Of an empty row, and of every row where layers have no states.
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class States:
    """One delta net's pools: its filter's last inputs (N, C, W - 1), the latest last, and its matrices (N, Hv, K, V);
    float32, since what is rounded in one step is carried to all that follow.
    """

    inputs: Tensor
    matrices: Tensor


class Cache:
    """Pages of keys and values of all layers that attend, (layers, pages, heads, positions, features) each, those of
    layers with other heads apart; and states of the others, in ``slots`` slots. Latents stand in the keys' place, of
    one head, and there are no values.
    """

    def __init__(self, shape: CacheShape, layout: EngineLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._pages = []
        for layers, heads, size in shape.heads:
            sizes = layers, layout.pages, heads, CACHE_PAGE, size
            values = sizes if not shape.latent else (*sizes[:2], 0, 0, 0)
            self._pages.append(tuple(torch.empty(each, dtype=dtype, device=device) for each in (sizes, values)))
        self.keys, self.values = self._pages[0]
        self._pools = shape.pools
        self.slots = slots_of(shape, layout.rows)
        self._places = shape.places
        self._states: tuple[States, ...] = ()
        if shape.net is not None:
            net, leading = shape.net, (shape.nets, self.slots)
            inputs = torch.empty((*leading, net.channels, net.filter_width - 1), device=device)
            matrices = torch.empty((*leading, net.value_heads, net.key_dim, net.value_dim), device=device)
            self._states = tuple(States(*pools) for pools in zip(inputs, matrices, strict=True))

    @property
    def has_states(self) -> bool:
        """True if some layers are delta nets."""
        return bool(self._states)

    def layer(self, index: int) -> Pages:
        """The pages of decoder layer number ``index``, which attends."""
        place = self._places[index] if self._places else index
        keys, values = self._pages[self._pools[index] if self._pools else 0]
        return Pages(keys[place], values[place])

    def latents(self, index: int) -> Tensor:
        """The pages of decoder layer number ``index``, which attends by latents: (pages, positions, features)."""
        return self.keys[index, :, 0]

    def states(self, index: int) -> States:
        """The states of decoder layer number ``index``, a delta net."""
        return self._states[self._places[index]]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The content of some pages into others, in all layers."""
        if not sources:
            return
        into, out_of = (torch.tensor(pages, device=self.keys.device) for pages in (targets, sources))
        for pool in (pool for pair in self._pages for pool in pair):
            pool.index_copy_(1, into, pool.index_select(1, out_of))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """The content of some slots into others, layer by layer: of all at once they would be many gigabytes."""
        if not sources:
            return
        into, out_of = (torch.tensor(slots, device=self.keys.device) for slots in (targets, sources))
        for states in self._states:
            for pool in (states.inputs, states.matrices):
                pool.index_copy_(0, into, pool.index_select(0, out_of))


@dataclass(frozen=True, slots=True)
class PromptStates:
    """Where the prompts of a call (1, S) lie, and where the states go that they leave.

    ``starts``: (1, S) int32, the first token of each token's prompt. ``ends``: (P,) int32, the prompts' last tokens, in
    order. ``slots``: (P,) int64.
    """

    starts: Tensor
    ends: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Prefill:
    """A call over whole prompts, (1, S): keys, values and last states are kept; what layers give is that of training.

    ``page`` and ``spot``: (S,) int64, where each token's are written. ``prompts``: None where layers have no states.
    """

    cache: Cache
    page: Tensor
    spot: Tensor
    prompts: PromptStates | None = None

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

    def attend_latents(
        self, layer: int, latents: Tensor, query: Callable[[], Tensor], *, width: int, scaling: float
    ) -> None:
        """Keeps latents (:class:`ftcli.model.layers.LatentCache`); attention is left to the caller."""
        pool = self.cache.latents(layer)
        pool[self.page, self.spot] = latents[0].to(pool.dtype)

    def mix(
        self, layer: int, joined: Tensor, weights: NetWeights, sizes: NetSizes, *, backend: BackendName = "auto"
    ) -> Tensor:
        """A delta net (:class:`ftcli.model.layers.StateCache`); the states after each prompt are kept."""
        prompts, pools = _given(self.prompts), self.cache.states(layer)
        starts, ends = prompts.starts, prompts.ends
        parts = parts_of(joined, sizes)
        last = inputs_at(parts.mixed, weights.filter.shape[1], ends, starts)
        pools.inputs.index_copy_(0, prompts.slots, last.to(pools.inputs.dtype))
        filtered = causal_conv(parts.mixed, weights.filter, weights.filter_bias, starts=starts, backend=backend)
        gates = delta_gates(parts.decay, parts.strength, weights.a_log, weights.dt_bias, backend=backend)
        made = delta_rule_ends(*heads_of(filtered, sizes), *gates, ends, starts=starts, backend=backend)
        pools.matrices.index_copy_(0, prompts.slots, _given(made.last))
        return gated_norm(made.out, parts.gate, weights.norm, weights.eps, backend=backend).flatten(-2)


@dataclass(frozen=True, slots=True)
class Decode:
    """A call of one token a row, (B, 1), against the cache.

    ``table``: (B, T) int32; ``lengths``: (B,) int32, with the new token; ``longest``: a bound on them, where known.
    ``slots``: (B,) int32, contiguous, :data:`NO_SLOT` of an empty row; None where layers have no states. ``shared``:
    the pages that completions of one prompt have in common; None where each row is read for itself.
    """

    cache: Cache
    table: Tensor
    lengths: Tensor
    longest: int | None = None
    backend: BackendName = "auto"
    slots: Tensor | None = None
    shared: SharedPages | None = None

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
            sinks=sinks, longest=self.longest, shared=self.shared if window is None else None, backend=self.backend,
        )  # fmt: skip
        return out[:, None]

    def attend_latents(
        self, layer: int, latents: Tensor, query: Callable[[], Tensor], *, width: int, scaling: float
    ) -> Tensor:
        """Latents weighted by each head, (B, heads, width) (:class:`ftcli.model.layers.LatentCache`)."""
        pool = self.cache.latents(layer)
        return decode_latents(
            query().to(pool.dtype), latents[:, 0].to(pool.dtype), pool, self.table, self.lengths, width=width,
            scale=scaling, longest=self.longest, backend=self.backend,
        )  # fmt: skip

    def mix(
        self, layer: int, joined: Tensor, weights: NetWeights, sizes: NetSizes, *, backend: BackendName = "auto"
    ) -> Tensor:
        """A delta net (:class:`ftcli.model.layers.StateCache`): the state of each row goes on by its token."""
        slots, pools = _given(self.slots), self.cache.states(layer)
        parts = parts_of(joined[:, 0], sizes)
        filtered = conv_step(parts.mixed, weights.filter, weights.filter_bias, pools.inputs, slots, backend=backend)
        gates = delta_gates(parts.decay, parts.strength, weights.a_log, weights.dt_bias, backend=backend)
        out = delta_step(*heads_of(filtered, sizes), *gates, pools.matrices, slots, backend=backend)
        return gated_norm(out, parts.gate, weights.norm, weights.eps, backend=backend).flatten(-2)[:, None]


def _given(value: T | None) -> T:
    """The keyword arguments of a call of a model with delta nets."""
    if value is None:
        raise ValueError("this call has no place for the states of delta nets")
    return value
