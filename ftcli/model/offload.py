"""Activations in pinned host memory: what a layer keeps for backward leaves the GPU in the forward pass and comes back
just before it is needed.

Copies run on a stream of their own beside the computation. In the forward pass a tensor's device memory is let go when
the next one leaves, by which time its copy has long ended. In the backward pass the tensors that come next (``ahead``
of them) are on their way while a layer computes. Every order between streams is an event; device memory is allocated
and freed in the computing stream alone, so its amount is the same in every step.

Copies change no bits. On a CPU, whose memory is the host's, nothing is moved: what is left is plain checkpointing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ftcli.model.host_buffers import HostBuffers, matched

T = TypeVar("T")

#: Smaller tensors stay: they are no saving, and each copy has a cost of its own.
SMALLEST_BYTES = 1 << 20


@dataclass(slots=True)
class _Parcel:
    """One tensor away from the device. ``arriving``: its copy on the way back, with the event that ends it."""

    lane: _Lane
    pieces: tuple[Tensor, ...]
    shape: torch.Size
    dtype: torch.dtype
    before: weakref.ref[_Ticket] | None
    arriving: tuple[Tensor, torch.cuda.Event] | None = None


class _Ticket:
    """What autograd holds instead of a tensor. When it goes, the parcel's pieces are free."""

    __slots__ = ("__weakref__", "parcel")

    def __init__(self, parcel: _Parcel) -> None:
        self.parcel = parcel


class _Lane:
    """The traffic of one device."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._ahead = ahead
        self._newest: weakref.ref[_Ticket] | None = None
        self._leaving: tuple[weakref.ref[_Ticket], Tensor, torch.cuda.Event] | None = None
        self.buffers = HostBuffers(pinned=True)

    def send(self, tensor: Tensor) -> _Ticket:
        """Starts the copy to the host; ``tensor`` is held until the next one leaves."""
        compute = torch.cuda.current_stream(self._device)
        self._settle(compute)
        parcel = _Parcel(self, self.buffers.take(tensor.nbytes), tensor.shape, tensor.dtype, self._newest)
        done = self._copy([(piece, part) for part, piece in matched(tensor, parcel.pieces)], compute)
        ticket = _Ticket(parcel)
        # Not before: the pieces must outlive the copy, and a later copy into them waits in the same stream.
        weakref.finalize(ticket, self._release, parcel).atexit = False
        self._newest = weakref.ref(ticket)
        self._leaving = (self._newest, tensor, done)
        return ticket

    def fetch(self, ticket: _Ticket) -> Tensor:
        """The tensor on the device, ready in the current stream; those before it are started."""
        compute = torch.cuda.current_stream(self._device)
        parcel = ticket.parcel
        if self._leaving is not None and self._leaving[0]() is ticket:
            tensor = self._leaving[1]  # it has not been let go yet
            self._settle(compute)
        else:
            self._settle(compute)
            self._start(parcel, compute)
            assert parcel.arriving is not None
            tensor, done = parcel.arriving
            parcel.arriving = None
            compute.wait_event(done)
        self._prefetch(parcel, compute)
        return tensor

    def _prefetch(self, parcel: _Parcel, compute: torch.cuda.Stream) -> None:
        for _ in range(self._ahead):
            ticket = parcel.before() if parcel.before is not None else None
            if ticket is None:
                return
            parcel = ticket.parcel
            self._start(parcel, compute)

    def _start(self, parcel: _Parcel, compute: torch.cuda.Stream) -> None:
        if parcel.arriving is None:
            tensor = torch.empty(parcel.shape, dtype=parcel.dtype, device=self._device)
            parcel.arriving = tensor, self._copy(matched(tensor, parcel.pieces), compute)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]], compute: torch.cuda.Stream) -> torch.cuda.Event:
        """Each pair's target from its source in the lane's stream, after all that the computing stream has been given
        so far: what wrote the sources, and what used the targets' memory before.
        """
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self._stream.record_event()
        return done

    def _settle(self, compute: torch.cuda.Stream) -> None:
        """Lets the tensor go that is leaving: its memory is free for what the computing stream does after the copy."""
        if self._leaving is not None:
            compute.wait_event(self._leaving[2])
            self._leaving = None

    @staticmethod
    def _release(parcel: _Parcel) -> None:
        lane = parcel.lane
        if parcel.arriving is not None:  # fetched ahead and never asked for: a copy may still be writing to it
            torch.cuda.current_stream(lane._device).wait_event(parcel.arriving[1])
            parcel.arriving = None
        lane.buffers.give_back(parcel.pieces)


class Offload:
    """Sends what is saved for backward to the host. One for a model; not shared between threads.

    Args:
        ahead: Tensors fetched before they are asked for. One less than a layer saves is enough, and at least one.
        smallest_bytes: Tensors below this stay on the device.
    """

    def __init__(self, *, ahead: int = 1, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._ahead = ahead
        self._smallest = smallest_bytes
        self._lanes: dict[torch.device, _Lane] = {}

    @property
    def host_bytes(self) -> int:
        """Pinned host memory held."""
        return sum(lane.buffers.allocated_bytes for lane in self._lanes.values())

    @property
    def free_bytes(self) -> int:
        """What of it holds nothing at the moment."""
        return sum(lane.buffers.free_bytes for lane in self._lanes.values())

    def saving(self, like: Tensor) -> AbstractContextManager[Any]:
        """A context in which what is saved for backward goes to the host: tensors with as many rows as ``like``
        (..., H), the small ones excepted.
        """
        return saved_tensors_hooks(partial(self._pack, _rows(like)), _unpack) if like.is_cuda else nullcontext()

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Sends one contiguous tensor to the host; the function that comes back brings it to the device again, once."""
        if not tensor.is_cuda or tensor.nbytes < self._smallest:
            return lambda: tensor
        return partial(_unpack, self._lane(tensor.device).send(tensor))

    def checkpoint(self, function: Callable[..., T], hidden: Tensor, *args: Any) -> T:
        """``function(hidden, ...)``, run again in backward, with ``hidden`` (..., H) kept on the host.

        Takes the place of transformers' ``_gradient_checkpointing_func``.
        """
        with self.saving(hidden):
            result: T = checkpoint(function, hidden, *args, use_reentrant=False)
        return result

    def _pack(self, rows: int, tensor: Tensor) -> Tensor | _Ticket:
        if not tensor.is_cuda or not tensor.is_contiguous() or _rows(tensor) != rows or tensor.nbytes < self._smallest:
            return tensor
        return self._lane(tensor.device).send(tensor)

    def _lane(self, device: torch.device) -> _Lane:
        if device not in self._lanes:
            self._lanes[device] = _Lane(device, self._ahead)
        return self._lanes[device]


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1] if tensor.dim() and tensor.shape[-1] else 0


def _unpack(packed: Tensor | _Ticket) -> Tensor:
    return packed.parcel.lane.fetch(packed) if isinstance(packed, _Ticket) else packed
