"""Host memory for activations, in pieces that are allocated once and serve every tensor that comes.

A tensor lies in as many pieces as it needs. Sizes of pieces are powers of two, which is what torch's allocator of
pinned memory hands out anyway: the largest ones as long as they fit, then smaller ones for the rest. So what is
allocated exceeds what is stored by less than the smallest piece a tensor, and a tensor of 64 MiB is one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ftcli.plan.memory.pinned import SMALLEST_PIECE

#: The largest piece. Copies of this size run at the full rate, and pinning it takes some ten milliseconds.
LARGEST_PIECE = 1 << 26


class HostBuffers:
    """Pieces of host memory; each holds (a part of) one tensor at a time. Nothing is given back to the system."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[Tensor]] = {}
        self.allocated_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Allocated and holding nothing."""
        return sum(size * len(pieces) for size, pieces in self._free.items())

    def take(self, count: int) -> tuple[Tensor, ...]:
        """Pieces (uint8) of at least ``count`` bytes together, to be filled in order: free ones, then new ones."""
        larger = self._free_size(count, LARGEST_PIECE)  # a batch of shorter rows than the pieces were made for
        if larger is not None:
            return (self._free[larger].pop(),)
        pieces = []
        while count > 0:
            piece = self._piece(min(max(1 << (count.bit_length() - 1), SMALLEST_PIECE), LARGEST_PIECE))
            pieces.append(piece)
            count -= piece.numel()
        return tuple(pieces)

    def give_back(self, pieces: Sequence[Tensor]) -> None:
        """The pieces may be used again; copies out of them stand earlier in the stream than the next into them."""
        for piece in pieces:
            self._free.setdefault(piece.numel(), []).append(piece)

    def _free_size(self, least: int, most: int) -> int | None:
        """The smallest size in this range of which a piece is free."""
        return min((size for size, pieces in self._free.items() if pieces and least <= size <= most), default=None)

    def _piece(self, wanted: int) -> Tensor:
        """A free piece of ``wanted`` bytes or twice that, else the largest free one that is smaller, else a new one.

        No larger one: the rest of one tensor would take a whole piece from the next.
        """
        size = self._free_size(wanted, 2 * wanted)
        if size is None:
            size = max((size for size, pieces in self._free.items() if pieces and size < wanted), default=None)
        if size is not None:
            return self._free[size].pop()
        self.allocated_bytes += wanted
        return torch.empty(wanted, dtype=torch.uint8, pin_memory=self._pinned)


def matched(tensor: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """(part of the contiguous ``tensor``, the piece or the part of one that holds it), as bytes, in order."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    start = 0
    for piece in pieces:
        part = flat[start : start + piece.numel()]
        yield part, piece[: part.numel()]
        start += piece.numel()
