"""Small kernels beside a large product: bandwidth of the one, arithmetic of the other.

A large GEMM leaves multiprocessors idle in its last wave, and memory bandwidth throughout; the adapters' thin products
have work for both. Nothing is reordered inside a stream and nothing is accumulated across streams, so the bits are
those of one stream.

Memory: tensors made on the side come from that stream's own pool. Those that the main stream reads are named at the
join, so that neither another tensor nor the driver (with expandable segments) gets their memory before it has. Tensors
of the main stream must outlive ``join``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """The one side stream of a device."""
    return torch.cuda.Stream(index)


class Side:
    """A fork of the current CUDA stream, made where it is constructed. On any other device everything is in order.

    side = Side(x.device)
    y = torch.mm(x, w)          # large; goes first, so that the small ones fill what it leaves
    with side.work():
        xa = torch.mm(x, a)     # starts when the fork's past is done, whatever the first product does
    side.join(xa)               # from here on the main stream may use xa
    """

    def __init__(self, device: torch.device) -> None:
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _stream(self._main.device_index)
            self._fork = self._main.record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work given inside runs on the side."""
        if self._main is None:
            yield
            return
        self._side.wait_event(self._fork)
        with torch.cuda.stream(self._side):
            yield

    def join(self, *made: Tensor | None) -> None:
        """The main stream waits for the side, and will read what was ``made`` there: the allocator is told so."""
        if self._main is not None:
            self._main.wait_stream(self._side)
            for tensor in made:
                if tensor is not None:
                    tensor.record_stream(self._main)
