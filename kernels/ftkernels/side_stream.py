"""Small kernels beside a large product, on a second CUDA stream.

A large GEMM is bound by arithmetic: it leaves memory bandwidth unused, and in its last wave multiprocessors as well.
The adapters' thin products fill both gaps. Each stream keeps its order and nothing is accumulated across streams, so
results have the bits that one stream would give.

Memory: tensors made on the side stream come from that stream's own pool. ``join`` names those that the main stream is
going to read. Until it has, the allocator gives their memory neither to another tensor nor back to the driver (which
expandable segments would allow). Tensors of the main stream must outlive ``join``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """The one side stream of a device."""
    return torch.cuda.Stream(index)


class DeferredStream:
    """A third stream for products that nobody reads before a whole backward pass is over: gradients of adapters.

    On the side stream the next group's product would wait for them, and for the last of them nothing large is left to
    run beside. Here they run beside whatever comes next. Off, and then ``SideStream`` is all there is, unless inside
    ``deferring``: whoever opens that block must not read a gradient before it ends. Tensors that the products read are
    held until the group after has been launched, and the main stream waits for the products of the group before.
    """

    def __init__(self) -> None:
        self.on = False
        self._stream: torch.cuda.Stream | None = None
        self._held: tuple[torch.cuda.Event, Sequence[Tensor | None]] | None = None
        self._made: list[Tensor] = []

    @contextmanager
    def deferring(self, device: torch.device) -> Iterator[None]:
        """A backward pass on ``device``, after which the current stream may read what was made."""
        self._stream = self._stream or torch.cuda.Stream(device)
        self.on = True
        try:
            yield
            main = torch.cuda.current_stream(device)
            if self._held is not None:
                main.wait_stream(self._stream)
            for tensor in self._made:
                tensor.record_stream(main)
        finally:
            self.on, self._held, self._made = False, None, []

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream; inside ``deferring`` alone."""
        assert self._stream is not None
        return self._stream

    def hold(self, main: torch.cuda.Stream, made: Sequence[Tensor | None], reads: Sequence[Tensor | None]) -> None:
        """Notes what has just been ``made`` on the stream from what it ``reads``."""
        if self._held is not None:
            main.wait_event(self._held[0])
        self._held = self.stream.record_event(), reads
        self._made += [tensor for tensor in made if tensor is not None]


class SideStream:
    """A fork of the current CUDA stream at the point of construction. On other devices all work simply runs in order.

    side = SideStream(x.device)
    y = torch.mm(x, w)          # large; goes first, so that the small ones fill what it leaves
    with side.work():
        xa = torch.mm(x, a)     # waits for what came before the fork, not for the first product
    side.join(xa)               # from here on the main stream may use xa

    With ``deferred``, while that is on, work runs on its stream, and ``join`` waits for nothing.
    """

    def __init__(self, device: torch.device, deferred: DeferredStream | None = None) -> None:
        self._main: torch.cuda.Stream | None = None
        self._used = False
        self._deferred = deferred if deferred is not None and deferred.on else None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._side = _stream(self._main.device_index) if self._deferred is None else self._deferred.stream
            self._fork = self._main.record_event()

    @property
    def waits(self) -> bool:
        """True when ``join`` makes the main stream wait."""
        return self._deferred is None

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

    def join(self, *made: Tensor | None, reads: Sequence[Tensor | None] = ()) -> None:
        """Makes the main stream wait for the side; the allocator is told that it will read what was ``made`` there.

        Without any work on the side there is nothing to wait for; a stream that is being captured must not, either.
        ``reads``: what the work on the side reads, where the caller will not keep it.
        """
        if self._main is not None and self._used and self._deferred is not None:
            self._deferred.hold(self._main, made, reads)
        elif self._main is not None and self._used:
            self._main.wait_stream(self._side)
            for tensor in made:
                if tensor is not None:
                    tensor.record_stream(self._main)
