"""Small kernels beside a large product, on a second CUDA stream.

A large GEMM is bound by arithmetic: it leaves memory bandwidth unused, and in its last wave multiprocessors as well.
The adapters' thin products fill both gaps. Each stream keeps its order and nothing is accumulated across streams, so
results have the bits that one stream would give.

Memory: tensors made on the side stream come from that stream's own pool. ``join`` names those that the main stream is
going to read. Until it has, the allocator gives their memory neither to another tensor nor back to the driver (which
expandable segments would allow). Tensors of the main stream must outlive ``join``.
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
    """A fork of the current CUDA stream at the point of construction. On other devices all work simply runs in order.

    side = Side(x.device)
    y = torch.mm(x, w)          # large; goes first, so that the small ones fill what it leaves
    with side.work():
        xa = torch.mm(x, a)     # waits for what came before the fork, not for the first product
    side.join(xa)               # from here on the main stream may use xa
    """

    def __init__(self, device: torch.device) -> None:
        self._main: torch.cuda.Stream | None = None
        self._used = False
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _stream(self._main.device_index)
            self._fork = self._main.record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Kernels launched inside run on the side stream."""
        if self._main is None:
            yield
            return
        self._used = True
        self._side.wait_event(self._fork)
        with torch.cuda.stream(self._side):
            yield

    def join(self, *made: Tensor | None) -> None:
        """Makes the main stream wait for the side; the allocator is told that it will read what was ``made`` there.

        Without any work on the side there is nothing to wait for; a stream that is being captured must not, either.
        """
        if self._main is not None and self._used:
            self._main.wait_stream(self._side)
            for tensor in made:
                if tensor is not None:
                    tensor.record_stream(self._main)
