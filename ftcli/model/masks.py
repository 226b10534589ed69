"""Attention masks of one call: the object that transformers' mask interface makes for our attention.

transformers calls :func:`mask_for` once for each call of a model and layer type (full, windowed), and hands what it
returns to every layer of that type. It returns a :class:`CallMask`, which knows the call's lengths, window, padding and
documents, and makes a form of them that a backend reads only when a layer asks: intervals for the kernels, O(tokens);
transformers' own dense mask for everything else. Nothing is stored on a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from ftkernels.attention_mask import AttentionMask, TokenRanges, padding_bounds
from torch import Tensor

from ftcli.plan.attention import MaskKind

if TYPE_CHECKING:
    from ftcli.model.sequence_parallel import SequencePart

_Rule = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class CallMask:
    """The keys that each query of one call sees, for the layers of one type.

    What it makes it keeps, for all layers of the call and for their recomputation under gradient checkpointing; it goes
    with the call. Reading ``kind`` waits for the device once if there is padding or packing; nothing else does.

    Attributes:
        q_len, k_len: queries and keys. The queries are the last positions of the keys.
        window: None, or W: a query sees the W keys ending at its own position, exactly ``0 <= q - k < W``.
        padding: None, or (B, k_len) bool, True for tokens.
        packing: None, or transformers' rule ``(batch, head, query, key) -> bool`` of a call without padding that has
            more to it than causality and window: packed documents, as far as we know.
        irregular: the call is known to be none of this; only ``dense`` says what is seen.
        known: None, or all of it as the caller knew it beforehand (:class:`Documents`): nothing waits for the device.
        sequence: None, or the part of each row that this rank has; lengths and masks are those of whole rows.
    """

    q_len: int
    k_len: int
    window: int | None
    device: torch.device
    padding: Tensor | None
    packing: _Rule | None
    irregular: bool
    batch: int
    make_dense: Callable[[], Tensor]
    known: AttentionMask | None = None
    sequence: SequencePart | None = None

    def __getitem__(self, part: tuple[slice, ...]) -> CallMask:
        """transformers' cut of a mask (B, 1, q_len, k_len) to its last queries, in front of layers that share keys."""
        _, _, queries, _ = part
        count = len(range(self.q_len)[queries])
        if count == self.q_len:
            return self
        if self.packing is not None or self.known is not None or queries.stop is not None:
            raise ValueError("a mask of packed documents cannot be cut to some of its queries")
        return replace(self, q_len=count, make_dense=lambda: self.dense[:, :, queries])

    @property
    def kind(self) -> MaskKind:
        """The kind of mask that a backend has to support."""
        mask = self._mask
        if mask is None:
            return "any"
        whole = self.q_len == self.k_len and mask.starts is None and mask.document_starts is None
        return "plain" if whole else "intervals"

    @cached_property
    def ranges(self) -> TokenRanges:
        """The intervals that the kernels read.

        Raises:
            ValueError: the mask is not made of intervals (``kind`` is "any").
        """
        if self._mask is None:
            raise ValueError("this mask lets a query see keys that are not one interval")
        return self._mask.ranges(self.q_len, self.k_len, self.device)

    def starts(self) -> Tensor | None:
        """The first token of each token's document in its row, (B or 1, S) int32, as layers take it that carry a state
        from token to token; None where each row is one document. Padding in front of one is a document of its own.

        Raises:
            ValueError: branches, a window, or a part of the rows, none of which such layers can keep apart.
        """
        if self.window is not None or self.q_len != self.k_len or self.sequence is not None:
            raise ValueError("a state is carried over whole rows without a window")
        known = self.known
        if known is not None and known.branch_starts is not None:
            raise ValueError("a state cannot be carried over documents that branch")
        if known is not None:
            return None if known.document_starts is None else self.ranges.key_lo
        if self.padding is None and self.packing is None:
            return None
        first = self.ranges.key_lo  # of padding in front: a token that comes later
        return torch.where(first > torch.arange(self.q_len, device=first.device), 0, first)

    @cached_property
    def dense(self) -> Tensor:
        """transformers' boolean mask (B or 1, 1, q_len, k_len), True where a query sees a key."""
        return self.make_dense()

    @cached_property
    def _mask(self) -> AttentionMask | None:
        """None where intervals cannot say it."""
        if self.irregular:
            return None
        if self.known is not None:
            return self.known
        mask = AttentionMask.causal_mask(self.window)
        if self.packing is not None:
            return self._packed(self.packing)
        if self.padding is None:
            return mask
        bounds = padding_bounds(self.padding)
        return None if bounds.hole is not None else mask.bounded(bounds)

    def _packed(self, rule: _Rule) -> AttentionMask | None:
        """Reads the documents' bounds off two diagonals of the rule, with no more than S evaluations a row.

        A token that does not see its predecessor begins a document; and where some token sees its successor, the rule
        is not causal, and none of ours.
        """
        row = torch.arange(self.batch, device=self.device)[:, None]
        head = torch.zeros((), dtype=torch.int64, device=self.device)
        later = torch.arange(1, self.q_len, device=self.device)[None]
        shape = (self.batch, self.q_len - 1)
        if bool(rule(row, head, later - 1, later).any()):
            return None
        joined = rule(row, head, later, later - 1).expand(shape)
        return AttentionMask.from_boundaries(~joined, window=self.window)


@dataclass(frozen=True, eq=False)
class Documents:
    """Document boundaries of a call, taken from the batch: no mask function has to ask the device.

    It reaches attention as the keyword argument ``documents``, next to the masks that transformers had made.

    Attributes:
        starts: (B or 1, S) int32, for each token the position in its row at which its document begins; or (1, 1), a
            zero, where each row is one document.
        sequence: The part of each row that the call has tokens of; ``starts`` are those of whole rows. None: all.
        branches: None, or like ``starts``, for each token the position at which its branch begins
            (``ftkernels.attention_mask.AttentionMask.branch_starts``).
        blocks: None, or (B or 1, S) int32: the end of the tokens that each token sees ahead, those of its image
            (``ftkernels.attention_mask.AttentionMask.block_ends``).
        blocks_in_windows: Layers without a window do not look ahead.
    """

    starts: Tensor
    sequence: SequencePart | None = None
    branches: Tensor | None = None
    blocks: Tensor | None = None
    blocks_in_windows: bool = False
    _made: dict[tuple[int | None, bool], CallMask] = field(default_factory=dict, repr=False)

    def within(self, mask: CallMask) -> CallMask:
        """``mask`` without attention across documents; made once for all layers of a type."""
        kind = mask.window, mask.irregular
        if kind not in self._made:
            self._made[kind] = self._narrowed(mask)
        return self._made[kind]

    def _narrowed(self, mask: CallMask) -> CallMask:
        parts = 1 if self.sequence is None else self.sequence.parts
        if parts > 1 and mask.irregular:
            raise ValueError("ranks cannot share rows whose mask is not made of intervals")
        if parts > 1 and self.branches is not None:
            raise ValueError("ranks cannot share rows with branches")
        blocks = None if self.blocks_in_windows and mask.window is None else self.blocks
        whole = self.starts.shape[-1] == 1 and self.branches is None and blocks is None
        queries, keys = parts * mask.q_len, parts * mask.k_len
        starts = None if whole else self.starts.expand(-1, keys)
        own = AttentionMask(
            window=mask.window,
            document_starts=starts,
            length=None if whole else keys,
            branch_starts=self.branches,
            block_ends=blocks,
        )

        def make_dense() -> Tensor:
            dense = own.dense(queries, keys, mask.device)
            return dense & mask.dense if mask.irregular else dense

        return replace(
            mask,
            q_len=queries,
            k_len=keys,
            padding=None,
            packing=None,
            known=own,
            make_dense=make_dense,
            sequence=self.sequence,
        )


def plain_mask(like: Tensor, padding: Tensor | None = None, window: int | None = None) -> CallMask:
    """The mask of whole rows, ``like`` (B, S, ...): with ``padding`` (B, S), True or 1 for tokens, or without."""
    batch, length = like.shape[:2]
    own = AttentionMask.causal_mask(window)
    return CallMask(
        q_len=length,
        k_len=length,
        window=window,
        device=like.device,
        padding=None if padding is None else padding.bool(),
        packing=None,
        irregular=False,
        batch=batch,
        make_dense=lambda: own.dense(length, length, like.device),
    )


def mask_for(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: _Rule,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> CallMask:
    """transformers' mask interface (``AttentionMaskInterface``); the arguments are what its ``create_*_mask`` pass.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key in the text.
        attention_mask: (B, positions so far) bool, True for tokens; None without padding.
        allow_is_causal_skip: transformers' word that causality, window and padding are all there is.
        use_vmap: a caller has brought a mask function of its own.
    """
    device = torch.device(device)
    aligned = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    # Two-sided masks name their own skip; chunked attention passes its chunk as local_size, which is no window.
    two_sided = "allow_is_bidirectional_skip" in others
    windowed = local_size is None or local_size == getattr(config, "sliding_window", None)
    more = not allow_is_causal_skip
    packs = more and attention_mask is None and q_length == kv_length

    def make_dense() -> Tensor:
        from transformers.masking_utils import sdpa_mask

        alike = attention_mask is None and not more
        mask: Tensor = sdpa_mask(
            batch_size=1 if alike else batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return mask

    return CallMask(
        q_len=q_length,
        k_len=kv_length,
        window=local_size,
        device=device,
        padding=_padding_of_keys(attention_mask, kv_length, kv_offset),
        packing=mask_function if packs else None,
        irregular=use_vmap or two_sided or not aligned or not windowed or (more and not packs),
        batch=batch_size,
        make_dense=make_dense,
    )


def _padding_of_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The part of the mask that belongs to the keys: a sliding cache has dropped the first ones."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[-1]
    mask = F.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
    return mask[:, kv_offset : kv_offset + kv_length]
