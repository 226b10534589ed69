"""The keys that each query may see: one value object, made for one call of a model and stored nowhere.

It can say causal, sliding window, packed documents, padding on either side, and cached prefix. In all of these the keys
that a query sees are one interval, and neither end of it moves left from one query to the next. So the kernels need no
rule for each of them: they read ``key_lo`` and ``key_hi`` of each query (``TokenRanges``), take the bounds of their
loops from the first and the last row of a tile, and never visit a tile that is masked everywhere.

A document may also branch: several continuations of one beginning stand after each other, and each sees the beginning
and itself. Then a query's interval has one hole, the branches between; ``TokenRanges`` holds these too, and the kernels
take a form of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """``AttentionMask`` for given lengths. Query i sees key j where ``key_lo[i] <= j < key_hi[i]``; equivalently where
    ``query_lo[j] <= i < query_hi[j]``. A query with ``key_hi <= key_lo`` sees nothing.

    All are int32 and contiguous, with a batch dimension of B, or of 1 when all rows of the batch are alike: ``key_lo``
    and ``key_hi`` (B or 1, queries), ``query_lo`` and ``query_hi`` (B or 1, keys). These four do not fall along the
    last dimension where there are no holes.

    Attributes:
        key_holes, query_holes: None, or (B or 1, 2, queries) and (B or 1, 2, keys): begin and end of the hole in each
            interval, of keys that the query does not see for all that, and of queries that do not see the key. Where an
            interval has no hole, the hole ends where the interval begins. Both or neither.
    """

    key_lo: Tensor
    key_hi: Tensor
    query_lo: Tensor
    query_hi: Tensor
    key_holes: Tensor | None = None
    query_holes: Tensor | None = None

    @property
    def batch(self) -> int:
        """1, or the batch size where rows differ."""
        return int(self.key_lo.shape[0])

    @property
    def q_len(self) -> int:
        """Number of queries."""
        return int(self.key_lo.shape[1])

    @property
    def k_len(self) -> int:
        """Number of keys."""
        return int(self.query_lo.shape[1])

    def dense(self) -> Tensor:
        """Boolean (B or 1, 1, queries, keys), True where a query sees a key. For references: O(queries * keys)."""
        keys = torch.arange(self.k_len, device=self.key_lo.device, dtype=torch.int32)
        seen = (keys >= self.key_lo[:, :, None]) & (keys < self.key_hi[:, :, None])
        if self.key_holes is not None:
            seen &= (keys < self.key_holes[:, 0, :, None]) | (keys >= self.key_holes[:, 1, :, None])
        return seen[:, None]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of the attributes."""
        return self.key_lo, self.key_hi, self.query_lo, self.query_hi, self.key_holes, self.query_holes


@dataclass(frozen=True, slots=True, eq=False)
class PaddingBounds:
    """A padding mask as bounds: tokens of row b are ``[starts[b], ends[b])``, (B,) int32, of ``length`` positions.

    ``hole`` is the first row whose tokens are not one run, so that its bounds take in padding as well; None where there
    is no such row. ``dense`` is True where there is no padding at all.
    """

    starts: Tensor
    ends: Tensor
    length: int
    hole: int | None
    dense: bool


def padding_bounds(attention_mask: Tensor) -> PaddingBounds:
    """Reads a padding mask (B, length), nonzero for tokens; waits for the device once.

    Raises:
        ValueError: the mask has not two dimensions.
    """
    if attention_mask.dim() != 2:
        raise ValueError(f"expected a padding mask (batch, keys), got shape {tuple(attention_mask.shape)}")
    valid = attention_mask != 0
    length = int(valid.shape[1])
    index = torch.arange(length, device=valid.device, dtype=torch.int32)
    ends = torch.where(valid, index + 1, 0).amax(dim=1)
    starts = torch.minimum(torch.where(valid, index, length).amin(dim=1), ends)
    holes, dense = torch.stack([valid.sum(1) != ends - starts, valid.all(1)]).tolist()
    return PaddingBounds(starts, ends, length, holes.index(True) if any(holes) else None, all(dense))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """Which keys a query sees. Query i of q_len queries stands at position ``i + k_len - q_len`` among the keys.

    Attributes:
        causal: a query sees no key after its own position.
        window: None, or W: a query sees the W keys ending at its own position, exactly ``0 <= q - k < W``.
        starts, ends: None, or (B,) int32: tokens of row b outside ``[starts[b], ends[b])`` are padding. Padding sees
            nothing and is seen by nobody.
        document_starts: None, or (B or 1, k_len) int32: for each token the index of the first token of its document.
            No attention crosses documents.
        length: the number of keys that ``starts``, ``ends`` or ``document_starts`` were made for; None without them.
        branch_starts: None, or like ``document_starts``: for each token the index of the first token of its branch. The
            tokens that a document begins with, whose branch begins where it does, are its trunk. All branches see it,
            and no other branch; each goes on where the trunk ends, from where windows count. With a window a document
            has two branches at most. Only for whole causal rows without padding.
        block_ends: None, or (B or 1, k_len) int32: for each token the end of its block, whose tokens see each other in
            both directions, backwards as far as the window; of a token in no block, the next token. Blocks lie within
            documents. Only for causal rows without branches.

    Raises:
        ValueError: a window below 1 or without ``causal``, or tensors that do not fit each other.
    """

    causal: bool = True
    window: int | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None
    document_starts: Tensor | None = None
    length: int | None = None
    branch_starts: Tensor | None = None
    block_ends: Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (the token itself), got {self.window}")
        if self.window is not None and not self.causal:
            raise ValueError("a sliding window needs causal=True: it is 0 <= q - k < window")
        if (self.starts is None) != (self.ends is None):
            raise ValueError("starts and ends come together")
        if self.starts is not None and self.ends is not None and self.starts.shape != self.ends.shape:
            raise ValueError(f"starts {tuple(self.starts.shape)} and ends {tuple(self.ends.shape)} differ in shape")
        by_token = (self.starts, self.document_starts, self.block_ends)
        if any(each is not None for each in by_token) and self.length is None:
            raise ValueError("length is needed with starts, ends, document_starts or block_ends")
        if self.block_ends is not None and (not self.causal or self.branch_starts is not None):
            raise ValueError("blocks need causal=True and rows without branches")
        if self.branch_starts is None:
            return
        if not self.causal or self.starts is not None:
            raise ValueError("branches need causal=True and rows without padding")
        if self.document_starts is None or self.document_starts.shape != self.branch_starts.shape:
            raise ValueError("branch_starts need document_starts of their shape")

    @classmethod
    def full(cls) -> AttentionMask:
        """Every query sees every key."""
        return cls(causal=False)

    @classmethod
    def causal_mask(cls, window: int | None = None) -> AttentionMask:
        """Causal, with a sliding window where one is given."""
        return cls(window=window)

    @classmethod
    def from_padding(cls, attention_mask: Tensor, *, causal: bool = True, window: int | None = None) -> AttentionMask:
        """From a (B, k_len) mask with 1 for tokens and 0 for padding; see ``padded``."""
        return cls(causal=causal, window=window).padded(attention_mask)

    @classmethod
    def from_document_ids(
        cls, document_ids: Tensor, *, causal: bool = True, window: int | None = None
    ) -> AttentionMask:
        """From (B or 1, S) integers: every run of equal ids is a document."""
        return cls.from_boundaries(document_ids[:, 1:] != document_ids[:, :-1], causal=causal, window=window)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, length: int, *, causal: bool = True, window: int | None = None
    ) -> AttentionMask:
        """From (documents + 1,) cumulative lengths of one flat row of ``length`` tokens: 0, ..., ``length``."""
        index = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        document = torch.searchsorted(cu_seqlens.contiguous(), index, right=True) - 1
        return cls(causal, window, document_starts=cu_seqlens[document].to(torch.int32)[None], length=length)

    @classmethod
    def from_boundaries(cls, begins: Tensor, *, causal: bool = True, window: int | None = None) -> AttentionMask:
        """From (B or 1, S - 1) booleans: True at i where token i + 1 begins a document."""
        length = begins.shape[1] + 1
        index = torch.arange(1, length, device=begins.device, dtype=torch.int32)
        first = torch.zeros((begins.shape[0], 1), device=begins.device, dtype=torch.int32)
        starts = torch.cat([first, torch.where(begins, index, 0)], dim=1).cummax(dim=1).values
        return cls(causal, window, document_starts=starts.to(torch.int32), length=length)

    def with_window(self, window: int | None) -> AttentionMask:
        """The same mask with another window: Gemma-2's layers alternate between a window and None."""
        return replace(self, window=window)

    def padded(self, attention_mask: Tensor) -> AttentionMask:
        """The same mask with the padding of ``attention_mask`` (B, k_len), 1 for tokens; waits for the device once.

        A mask without padding leaves no trace, so dense batches take the dense path.

        Raises:
            ValueError: the ones of a row are not one run: padding is at the left or at the right, never inside.
        """
        bounds = padding_bounds(attention_mask)
        if bounds.hole is not None:
            raise ValueError(f"the padding mask of row {bounds.hole} has a hole: its ones must be one run")
        return self.bounded(bounds)

    def bounded(self, bounds: PaddingBounds) -> AttentionMask:
        """The same mask with padding that is known already; for a mask without holes."""
        if bounds.dense:
            return replace(self, starts=None, ends=None)
        return replace(self, starts=bounds.starts, ends=bounds.ends, length=bounds.length)

    def ranges(self, q_len: int, k_len: int, device: torch.device | str) -> TokenRanges:
        """The intervals that kernels read. Make them once per mask and call of the model, not once per layer.

        Raises:
            ValueError: more queries than keys, or a length that padding or documents were not made for.
        """
        self._check_lengths(q_len, k_len)
        if self.document_starts is not None and self.branch_starts is not None:
            return _branching(self.document_starts.to(device), self.branch_starts.to(device), self.window)
        position = torch.arange(k_len - q_len, k_len, device=device, dtype=torch.int32)[None]
        lo = torch.zeros_like(position)
        hi = torch.full_like(position, k_len)
        if self.document_starts is not None:
            first = self.document_starts.to(device).contiguous()
            past = torch.searchsorted(first, first, right=True, out_int32=True)
            lo, hi = first[:, k_len - q_len :], past[:, k_len - q_len :]
        if self.causal:
            ends = self.block_ends
            hi = torch.minimum(hi, position + 1 if ends is None else ends.to(device)[:, k_len - q_len :])
        if self.window is not None:
            lo = torch.maximum(lo, position - (self.window - 1))
        if self.starts is not None and self.ends is not None:
            start, end = self.starts.to(device)[:, None], self.ends.to(device)[:, None]
            # A query that is padding gets an empty interval, on the side that keeps both ends monotone.
            hi = torch.where(position < start, torch.minimum(hi, start), torch.minimum(hi, end))
            lo = torch.where(position >= end, torch.maximum(lo, end), torch.maximum(lo, start))
        lo, hi = lo + torch.zeros_like(hi), hi + torch.zeros_like(lo)  # both of both batch sizes
        lo, hi = lo.to(torch.int32), hi.to(torch.int32)
        # Query i sees key j iff lo[i] <= j, true for a prefix of the queries, and hi[i] > j, true for a suffix.
        keys = torch.arange(k_len, device=device, dtype=torch.int32).expand(lo.shape[0], k_len).contiguous()
        return TokenRanges(
            key_lo=lo,
            key_hi=hi,
            query_lo=torch.searchsorted(hi, keys, right=True, out_int32=True),
            query_hi=torch.searchsorted(lo, keys, right=True, out_int32=True),
        )

    def dense(self, q_len: int, k_len: int, device: torch.device | str = "cpu") -> Tensor:
        """Boolean (B or 1, 1, q_len, k_len) straight from the definition, for references and tests."""
        self._check_lengths(q_len, k_len)
        key = torch.arange(k_len, device=device)
        query = torch.arange(k_len - q_len, k_len, device=device)
        distance = query[:, None] - key[None, :]
        seen = torch.ones((1, 1, q_len, k_len), dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (distance >= 0)
        if self.block_ends is not None:
            block = self.block_ends.to(device)
            seen = seen | (block[:, None, k_len - q_len :, None] == block[:, None, None, :])
        if self.document_starts is not None:
            document = self.document_starts.to(device)
            seen = seen & (document[:, None, k_len - q_len :, None] == document[:, None, None, :])
            if self.branch_starts is not None:
                branch = self.branch_starts.to(device)
                trunk = branch == document
                # Of a token in a branch: by how much its index is more than its position in trunk and branch.
                fork = document + (seen.any(1) & trunk[:, None, :]).sum(-1)
                ahead = torch.where(trunk, 0, branch - fork)
                distance = distance - ahead[:, None, :, None] + ahead[:, None, None, :]
                seen = seen & (trunk[:, None, None, :] | (branch[:, None, :, None] == branch[:, None, None, :]))
        if self.window is not None:
            seen = seen & (distance < self.window)
        if self.starts is not None and self.ends is not None:
            start, end = self.starts.to(device)[:, None], self.ends.to(device)[:, None]
            token = (key >= start) & (key < end)
            seen = seen & token[:, None, k_len - q_len :, None] & token[:, None, None, :]
        return seen

    def _check_lengths(self, q_len: int, k_len: int) -> None:
        if q_len > k_len:
            raise ValueError(f"{q_len} queries for {k_len} keys: the queries are the last of the keys' positions")
        if self.length is not None and self.length != k_len:
            raise ValueError(f"the mask was made for {self.length} keys, there are {k_len}")
        if self.branch_starts is not None and q_len != k_len:
            raise ValueError(f"branches are for whole rows: {q_len} queries, {k_len} keys")


def _branching(first: Tensor, begins: Tensor, window: int | None) -> TokenRanges:
    """The intervals of documents with branches; ``first`` and ``begins`` are ``document_starts`` and ``branch_starts``.

    A query of a branch sees trunk and branch; what lies between is its hole. A key is seen to the end of its branch, or
    of the document where it is in the trunk. Through a window W a key of the trunk is seen by the W - 1 tokens after
    it, and by the first tokens of the second branch, as far as the window reaches beyond the trunk: a hole, too.
    """
    first, begins = first.contiguous(), begins.contiguous()
    index = torch.arange(first.shape[1], device=first.device, dtype=torch.int32).expand(first.shape).contiguous()
    branch_end = torch.searchsorted(begins, begins, right=True, out_int32=True)
    document_end = torch.searchsorted(first, first, right=True, out_int32=True)
    trunk = begins == first
    fork = branch_end.gather(1, first.long())  # the end of the trunk, which may be the document's
    lo, query_hi = first, torch.where(trunk, document_end, branch_end)
    query_hole = query_hi, query_hi
    if window is not None:
        reach = index - (window - 1)
        lo = torch.maximum(first, torch.where(trunk | (reach >= begins), reach, reach - (begins - fork)))
        second = branch_end.gather(1, fork.long().clamp(max=first.shape[1] - 1))
        two = trunk & (fork < document_end) & (second < document_end) & (index + window > fork)
        query_hi = torch.minimum(index + window, torch.where(two, second, query_hi))
        query_hole = query_hi, torch.where(two, second, query_hi)
        query_hi = torch.where(two, torch.minimum(second + (index + window - fork), document_end), query_hi)
    return TokenRanges(
        key_lo=lo.contiguous(),
        key_hi=index + 1,
        query_lo=index,
        query_hi=query_hi,
        key_holes=_holes(fork, torch.where(trunk, fork, begins), lo),
        query_holes=_holes(*query_hole, index),
    )


def _holes(begin: Tensor, end: Tensor, lo: Tensor) -> Tensor:
    """(B, 2, S) int32: a hole that is empty, or lies before an interval from ``lo`` on, becomes one that ends there."""
    is_one = end > torch.maximum(begin, lo)
    return torch.stack([torch.where(is_one, begin, 0), torch.where(is_one, end, lo)], dim=1).to(torch.int32)
