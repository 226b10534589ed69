"""The layout of generation: rows at once, pages of the KV cache, states of delta nets, sizes that decoding comes in.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftkernels.limits import CACHE_PAGE

from ftcli.facts.layers import DeltaNet
from ftcli.facts.shape import ModelShape
from ftcli.plain import JsonMap, map_in
from ftcli.tables.architecture import Family

#: Tokens of prompts that go through the model at once, unless one prompt alone is longer. On a CPU rows that share a
#: pass are kept apart by a mask over all pairs.
PREFILL_TOKENS = {"cuda": 8192, "cpu": 1024}
#: Rows that are decoded together come in these numbers, and multiples of the last one: one CUDA graph each.
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
#: Rows that GRPO decodes together at most; further ones wait.
MOST_ROWS = 128
#: Float32 tensors of a row's logits that choosing a token takes at once.
LOGIT_COPIES = 4
#: Rotary embeddings whose frequencies change with the longest position of a call: rows of one batch would meet others'.
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
#: Share of the memory that is free when an engine is built that it leaves alone.
_SPARED = 0.1


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One position of the key-value cache: of ``layers`` layers, keys and values of ``key_heads`` heads each; and the
    state of one row: of ``nets`` layers, what a delta net ``net`` carries from token to token.

    ``places``: for each decoder layer its place among those of its kind, or that of the layer whose keys it takes;
    empty where all attend alike. ``further``: of layers with other heads, their number, their key heads, and the size
    of these; ``pools``: for each decoder layer whether its pages are of the first heads, 0, or which of these.
    ``latent``: features of a position that stand for the values of all heads, its first ones; 0 where values are kept
    beside keys.
    """

    layers: int
    key_heads: int
    head_dim: int
    element_bytes: int
    nets: int = 0
    net: DeltaNet | None = None
    places: tuple[int, ...] = ()
    further: tuple[tuple[int, int, int], ...] = ()
    pools: tuple[int, ...] = ()
    latent: int = 0

    @property
    def heads(self) -> tuple[tuple[int, int, int], ...]:
        """Of the layers with each kind of heads their number, their key heads, and the size of these."""
        return ((self.layers, self.key_heads, self.head_dim), *self.further)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, of all layers."""
        features = sum(layers * heads * size for layers, heads, size in self.heads)
        return (1 if self.latent else 2) * features * self.element_bytes * CACHE_PAGE

    @property
    def widest_head(self) -> int:
        """Features of the widest head."""
        return max(size for _, _, size in self.heads)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's state, of all delta nets: float32, the filter's last inputs and the matrix of each head."""
        if self.net is None:
            return 0
        inputs = self.net.channels * (self.net.filter_width - 1)
        return 4 * self.nets * (inputs + self.net.value_heads * self.net.key_dim * self.net.value_dim)


def cache_shape(shape: ModelShape, element_bytes: int) -> CacheShape:
    """Shape of the cache of a model's layers: keys and values, or latents, in elements of so many bytes."""
    if shape.latents:  # a position is one latent and one rotated key, for all heads
        one = shape.latents[0]
        return CacheShape(shape.num_layers, 1, sum(one.kept), element_bytes, latent=one.kept[0])
    nets = shape.delta_nets
    if shape.family.global_heads:
        return _of_several_heads(shape, element_bytes)
    attend = [layer.delta_net is None for layer in shape.layers]
    places = tuple(attend[:at].count(one) for at, one in enumerate(attend)) if nets else ()
    kept = sum(attend), shape.num_kv_heads, shape.head_dim, element_bytes
    return CacheShape(*kept, len(nets), nets[0] if nets else None, places)


def _of_several_heads(shape: ModelShape, element_bytes: int) -> CacheShape:
    """Where layers differ in their heads, and some take keys of the last one before them that sees what they see."""
    kinds = list(dict.fromkeys((each.kv_heads, each.head_dim) for each in shape.attending))
    counts, last = [0] * len(kinds), dict[int | None, tuple[int, int]]()
    found = []
    for each in shape.attending:
        if each.keys != "shared":
            pool = kinds.index((each.kv_heads, each.head_dim))
            last[each.window] = pool, counts[pool]
            counts[pool] += 1
        found.append(last[each.window])
    first, *further = ((count, *kind) for count, kind in zip(counts, kinds, strict=True))
    pools, places = zip(*found, strict=True)
    return CacheShape(*first, element_bytes, places=places, further=tuple(further), pools=pools)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """The capacity of an engine: at most ``rows`` sequences at once, ``pages`` of cache, and merged weights or none."""

    rows: int
    pages: int
    merged: bool


def pages_of(tokens: int) -> int:
    """Pages of a sequence."""
    return -(-tokens // CACHE_PAGE)


def bucket_of(rows: int) -> int:
    """Number of rows that are decoded for ``rows`` wanted ones; those beyond are empty."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= rows), -(-rows // largest) * largest)


def slots_of(shape: CacheShape, rows: int) -> int:
    """States that an engine for so many rows has: one a row, and one of a prompt whose completions have not all begun.

    Other prompts that are computed beside it have places for all of their completions among the rows, and the state of
    each stands in one of these.
    """
    return rows + 1 if shape.nets else 0


def _pages(rows: int, longest: int) -> int:
    """Pages of ``rows`` sequences of ``longest`` tokens; page 0, which is nobody's; and one for the end of a prompt, of
    which each completion but the last one has a copy.
    """
    return rows * pages_of(longest) + 2


def _held_bytes(shape: CacheShape, rows: int, longest: int) -> int:
    """Bytes of pages and states for ``rows`` sequences of ``longest`` tokens."""
    return _pages(rows, longest) * shape.page_bytes + slots_of(shape, rows) * shape.state_bytes


def cache_bytes(shape: CacheShape, rows: int, longest: int) -> int:
    """Bytes of a KV cache, and of states, for ``rows`` sequences of ``longest`` tokens, with headroom."""
    return int(_held_bytes(shape, rows, longest) / (1 - _SPARED))


def choose_layout(
    shape: CacheShape, rows: int, longest: int, *, room_bytes: int | None, copy_bytes: int | None
) -> EngineLayout | None:
    """The largest layout that fits; None if not even one sequence does. Weights are merged only where ``rows``
    sequences of ``longest`` tokens have room beside the copy. ``room_bytes``: None: no limit is known, and nothing is
    copied; ``copy_bytes``: None: there is nothing to merge.
    """
    whole = EngineLayout(rows, _pages(rows, longest), merged=False)
    if room_bytes is None:
        return whole
    room = int(room_bytes * (1 - _SPARED))
    if copy_bytes is not None and copy_bytes + _held_bytes(shape, rows, longest) <= room:
        return replace(whole, merged=True)
    of_none, of_a_row = _held_bytes(shape, 0, longest), pages_of(longest) * shape.page_bytes + shape.state_bytes
    fitting = min(rows, (room - of_none) // of_a_row)
    if fitting < 1:
        return None
    pages = (room - slots_of(shape, fitting) * shape.state_bytes) // max(shape.page_bytes, 1)
    return EngineLayout(fitting, min(pages, whole.pages), merged=False)


def why_no_engine(text_config: JsonMap, family: Family | None, *, on_kernels: bool) -> str | None:
    """The reason why transformers' own ``generate`` answers in place of the engine, as one clause, or None. ``family``
    is that of layers which are causal attention, or delta nets.
    """
    if family is None:
        return f"the layers of model_type {text_config.get('model_type')} are not known to be causal attention alone"
    if family.attention_alone and not on_kernels:
        return f"transformers' layers of model_type {text_config.get('model_type')} hand no cache of ours to attention"
    if family.delta_nets is not None and not on_kernels:
        return f"transformers' layers of model_type {text_config.get('model_type')} take no states of ours"
    if family.latents is not None and not on_kernels:
        return f"transformers' layers of model_type {text_config.get('model_type')} keep latents in caches of their own"
    kind = batch_dependent_rope(text_config)
    return None if kind is None else f"rotary embeddings of kind {kind} depend on the longest row of a batch"


def batch_dependent_rope(text_config: JsonMap) -> str | None:
    """The kind of a model's rotary embeddings where they depend on the longest position of a call, else None."""
    rope = map_in(text_config, "rope_parameters") or map_in(text_config, "rope_scaling")
    every = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    kinds = [one.get("rope_type", one.get("type")) for one in every]
    return next((kind for kind in kinds if kind in _BATCH_DEPENDENT_ROPE), None)
