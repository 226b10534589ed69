"""Host offload: activations, and a frozen embedding, in pinned host memory.

What a layer saves for backward leaves the GPU in the forward pass and comes back just before it is needed. Copies run
on a side stream. In the forward pass a tensor's device memory is freed when the next one leaves, by which time its copy
has long ended. In the backward pass the tensors that come next (``ahead`` of them) are on their way while a layer
computes. Every order between streams is an event; device memory is allocated and freed in the computing stream alone,
so its amount is the same in every step. Copies change no bits. On a CPU nothing is moved: plain checkpointing is left.

Host memory comes in pieces that are allocated once and reused. Sizes of pieces are powers of two, which is what torch's
allocator of pinned memory hands out anyway: the largest ones as long as they fit, then smaller ones for the rest. So
what is allocated exceeds what is stored by less than the smallest piece a tensor, and 64 MiB are one copy.

An embedding's table in pinned host memory is read by the GPU row by row: a frozen table of 128,256 x 4,096 takes
0.98 GiB of the device, of which a micro-batch of 2,048 tokens reads 16 MiB.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from ftkernels.host_rows import host_rows
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ftcli.model.backbone import base_of
from ftcli.plan.memory.workspaces import SMALLEST_PIECE
from ftcli.reporting import Reporter
from ftcli.tables.architecture import LAYER_INPUT
from ftcli.units import gib

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

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
    """Stands for a tensor in autograd's saved tensors. When it is freed, the parcel's pieces are free."""

    __slots__ = ("__weakref__", "parcel")

    def __init__(self, parcel: _Parcel) -> None:
        self.parcel = parcel


class _Lane:
    """The traffic of one device."""

    def __init__(self, device: torch.device, ahead: int) -> None:
        self._stream = torch.cuda.Stream(device)
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
            tensor = self._leaving[1]  # it has not been freed yet
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
        """Frees the tensor that is leaving: the computing stream may use its memory after the copy."""
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
        """Pinned host memory that holds nothing at the moment."""
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


class HostEmbedding(nn.Module):
    """Takes the place of a frozen ``nn.Embedding``, and gives its bits.

    The table is neither a parameter nor a buffer: what moves a model to a device, saves it or asks for its first
    parameter must not meet it.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        table = embedding.weight.detach()
        self._table = torch.empty(table.shape, dtype=table.dtype, pin_memory=table.is_cuda)
        self._table.copy_(table)

    @property
    def weight(self) -> Tensor:
        """(V, H), on the host."""
        return self._table

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., H), on the device of ``ids``."""
        return host_rows(self._table, ids)


class ScaledHostEmbedding(HostEmbedding):
    """Takes the place of a frozen embedding of transformers' that multiplies its rows by ``embed_scale``."""

    def __init__(self, embedding: Any) -> None:
        super().__init__(embedding)
        self.register_buffer("embed_scale", embedding.embed_scale, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 -> (..., H), on the device of ``ids``."""
        scale: Tensor = self.embed_scale  # type: ignore[assignment]
        return super().forward(ids) * scale.to(self.weight.dtype)


def why_not_on_host(model: PreTrainedModel | PeftModel) -> str | None:
    """The reason why the embedding has to stay on the device, as one clause; None if it need not."""
    base = base_of(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        return f"it is a {type(embedding).__name__}, which does more than look rows up"
    if embedding.weight.requires_grad:
        return "it is trained"
    if head is not None and head.weight is embedding.weight:
        return "the head has the same weight"
    if embedding.max_norm is not None:
        return "its rows are renormalised when they are read"
    return None


def use_host_embedding(model: PreTrainedModel | PeftModel, reporter: Reporter) -> None:
    """Puts the model's embedding into host memory, or tells why it has to stay; and the table of layers' own inputs."""
    _use_host_table(base_of(model).get_decoder(), reporter)
    reason = why_not_on_host(model)
    if reason is not None:
        reporter.info(f"embedding: on the device, since {reason}")
        return
    base = base_of(model)
    embedding = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    moved = HostEmbedding(embedding)
    moved._forward_hooks.update(embedding._forward_hooks)  # such as rounding what it gives
    moved.train(embedding.training)
    base.set_submodule(name, moved)
    table = moved.weight
    reporter.info(f"embedding: {gib(table.numel() * table.element_size())} GiB in host memory")


def _use_host_table(decoder: Any, reporter: Reporter) -> None:
    table = getattr(decoder, LAYER_INPUT.table, None)
    if table is None or table.weight.requires_grad:
        return
    moved = ScaledHostEmbedding(table)
    moved.train(table.training)
    setattr(decoder, LAYER_INPUT.table, moved)
    reporter.info(f"table of layers' own inputs: {gib(moved.weight.nbytes)} GiB in host memory")
