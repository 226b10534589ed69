"""Host memory for activations, in pieces that are allocated once and serve every tensor that comes.

A tensor lies in as many pieces as it needs. Sizes of pieces are powers of two, which is what torch's allocator of
pinned memory hands out anyway: the largest ones as long as they fit, then smaller ones for the rest. So what is
allocated exceeds what is stored by less than the smallest piece a tensor, and a tensor of 64 MiB is one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: The largest piece. Copies of this size run at the full rate, and pinning it takes some ten milliseconds.
LARGEST_PIECE = 1 << 26
#: The smallest one.
SMALLEST_PIECE = 1 << 20


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

    def _piece(self, wanted: int) -> Tensor:
        """The smallest free piece of at least ``wanted`` bytes, else the largest free one, else a new one."""
        sizes = [size for size, pieces in self._free.items() if pieces]
        fitting = [size for size in sizes if size >= wanted]
        if sizes:
            return self._free[min(fitting) if fitting else max(sizes)].pop()
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
