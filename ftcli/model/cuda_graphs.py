"""The decoder layers as CUDA graphs: one for forward and one for backward of every shape of a micro-batch.

A step of few tokens is bound by the host, which launches thousands of small kernels. A graph launches them at once. The
kernels, their order and their arguments are those of a step without graphs, and so are the bits.

The first micro-batch of all runs as usual, which compiles and chooses whatever is chosen on first use; the second of
its shape is captured, and from then on the first one of each other shape whose kernels are the same. All graphs share
one pool of memory: they never run at the same time, and none leaves anything in it. What goes in and out lies in
buffers of the largest shape, outside of the pool.

The pool is taken in one piece before the first capture. Pieces that are added for each larger shape cannot be joined,
and what one shape has left behind rarely fits the next: 36 to 39 shapes once made a peak of 90 GiB of what is
54 GiB now (H200, 2026-11-22; docs/performance.md).

A graph writes gradients to the same place in every replay. What it wrote becomes the weights' ``grad``; in the next
micro-batch of an accumulated step it is moved aside first, and added to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from ftkernels.attention_mask import TokenRanges
from ftkernels.projection import gradient_dtype
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from ftcli.model.fused import DecoderStack, LayerCall, StackCall
from ftcli.reporting import Reporter

#: Shapes that are captured at most. Each graph takes some MiB of its own; further shapes run without.
MOST_SHAPES = 64

_Key = tuple[torch.Size, torch.Size, bool, bool, bool, int, bool]


@dataclass(slots=True)
class GraphStatus:
    """State of a run's CUDA graphs.

    Attributes:
        shapes: (B, S) of each that was captured.
        replays, without: Micro-batches that graphs ran, and that ran as usual.
        beyond: Of the latter, those of a shape that came when as many were captured as may be.
        stopped: Why graphs were given up, as one clause; None while they are not.
        pool_bytes: Memory of the device that the graphs keep to themselves.
        pool_counted_bytes: The part of it that torch counts as allocated, such as cuBLAS' workspaces.
        earlier_peak_bytes: torch's peak of allocated bytes before the last capture.
    """

    shapes: list[tuple[int, int]]
    replays: int = 0
    without: int = 0
    beyond: int = 0
    stopped: str | None = None
    pool_bytes: int = 0
    pool_counted_bytes: int = 0
    earlier_peak_bytes: int = 0

    @property
    def outcome(self) -> str:
        """``on``, or what became of the graphs otherwise, as one clause."""
        if self.stopped is not None:
            return f"given up after {self.replays:,} micro-batches: {self.stopped}"
        if self.beyond:
            return f"on, except for {self.beyond:,} micro-batches of shapes beyond the first {MOST_SHAPES}"
        return "on"

    @property
    def peak_bytes(self) -> int:
        """The most memory of the device that was needed at once. What lies in the graphs' pool is in use all the time,
        though torch counts it as free.
        """
        idle = self.pool_bytes - self.pool_counted_bytes
        return max(self.earlier_peak_bytes, torch.cuda.max_memory_allocated() + idle)


@dataclass(frozen=True, slots=True)
class _Captured:
    """The graphs of one shape, and the tensors that they read and write. ``beside``: the layers' own inputs, (B, S,
    layers, P), where they have some.
    """

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    hidden: Tensor
    beside: Tensor | None
    out: Tensor
    d_out: Tensor
    d_hidden: Tensor | None
    d_beside: Tensor | None
    layer_calls: tuple[LayerCall, ...]


class GraphRunner:
    """Runs the calls of a stack in training: by graphs where a shape comes again, else as usual.

    Args:
        stack: Its trained weights must stay where they are in memory.
        tokens: The most tokens of a micro-batch that graphs take; larger ones run as usual.
        reporter: Gets a line when graphs are given up.
        pool_bytes: What the largest micro-batch is expected to allocate in the layers. More is added where it is not
            enough, less is not given back.
    """

    def __init__(self, stack: DecoderStack, tokens: int, reporter: Reporter, *, pool_bytes: int = 0) -> None:
        self.status = GraphStatus([])
        self._expected = pool_bytes
        self._reporter = reporter
        self._stack = stack
        self._tokens = tokens
        self._layers = _Layers(stack)
        named = {name: p for name, p in self._layers.named_parameters() if p.requires_grad}
        self._names, self._trained = list(named), list(named.values())
        self._where = [p.data_ptr() for p in self._trained]
        self._pool: _Pool | None = None
        self._seen: set[_Key] = set()
        self._captured: dict[_Key, _Captured] = {}
        self._buffers: dict[str, Tensor] = {}
        self._gradients: Gradients | None = None

    def __call__(self, call: StackCall) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        captured = self._graphs_for(call) if torch.is_grad_enabled() and self.status.stopped is None else None
        if captured is None:
            self.status.without += 1
            return self._stack.run(call)
        if [p.data_ptr() for p in self._trained] != self._where:
            raise RuntimeError("trained weights have moved since the layers were captured in CUDA graphs")
        _copy_in(captured, call)
        self.status.replays += 1
        # A trained weight is among the inputs so that autograd sees something to train.
        given = call.hidden, self._trained[0], *_layer_inputs(call)
        out: Tensor = _Replay.apply(self, captured, *given)  # type: ignore[no-untyped-call]
        return out

    def _graphs_for(self, call: StackCall) -> _Captured | None:
        if call.hidden.shape[0] * call.hidden.shape[1] > self._tokens:
            return None
        key = _key(call)
        if key in self._captured:
            return self._captured[key]
        seen = key in self._seen
        self._seen.add(key)
        alike = any(other[2:] == key[2:] for other in self._captured)
        if not (seen or alike) or len(self._captured) >= MOST_SHAPES:
            self.status.beyond += seen
            return None
        try:
            self._captured[key] = self._capture_with_room(call)
        except torch.OutOfMemoryError:
            self._give_up("no memory was left for another CUDA graph")
        except RuntimeError:
            if seen:
                raise  # a shape seen before has nothing left to do that a capture cannot take
        return self._captured.get(key)

    def _give_up(self, reason: str) -> None:
        """Frees what graphs keep to themselves: without them the step may fit."""
        self._captured.clear()
        self._buffers.clear()
        self._pool = self._gradients = None
        self.status.stopped, self.status.pool_bytes, self.status.pool_counted_bytes = reason, 0, 0
        torch.cuda.empty_cache()
        self._reporter.info(f"CUDA graphs are switched off: {reason}; training goes on without them")

    # -- capture ---------------------------------------------------------------------------------------------

    def _capture_with_room(self, call: StackCall) -> _Captured:
        """Captures a shape. The allocator cannot empty its caches during a capture; so that is done where it must."""
        try:
            return self._capture_counted(call)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        return self._capture_counted(call)

    def _capture_counted(self, call: StackCall) -> _Captured:
        status = self.status
        status.earlier_peak_bytes = status.peak_bytes
        if self._pool is None:
            torch.cuda.empty_cache()
            self._pool = _Pool(self._expected, call.hidden.device)
        captured = self._capture(call, self._pool)
        status.earlier_peak_bytes = max(status.earlier_peak_bytes, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        status.pool_bytes, status.pool_counted_bytes = self._pool.sizes()
        status.shapes.append((int(call.hidden.shape[0]), int(call.hidden.shape[1])))
        return captured

    def _capture(self, call: StackCall, pool: _Pool) -> _Captured:
        if self._gradients is None:
            self._gradients = Gradients.zeros_like(self._trained)
        hidden, out, d_out = (self._buffer(name, call.hidden) for name in ("hidden", "out", "d_out"))
        d_hidden = self._buffer("d_hidden", call.hidden) if call.hidden.requires_grad else None
        beside, inputs_of_layers = None, _layer_inputs(call)
        if inputs_of_layers:
            beside = self._buffer("beside", torch.stack(inputs_of_layers, dim=2))
        trains_beside = any(each.requires_grad for each in inputs_of_layers)
        d_beside = self._buffer("d_beside", beside) if beside is not None and trains_beside else None
        layer_calls = _fixed(call.layer_calls)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        leaf = hidden.detach().requires_grad_(call.hidden.requires_grad)
        own = None if beside is None else beside.detach().requires_grad_(trains_beside)
        # Autograd remembers on which stream a weight was first used. In an earlier graph that is alive still, that was
        # not the stream of the capture; so the layers get leaves of their own, on the weights' memory.
        leaves = [p.detach().requires_grad_() for p in self._trained]
        with _cacheless_autocast():
            with pool.records(forward):
                weights = dict(zip(self._names, leaves, strict=True))
                fixed = StackCall(leaf, _with_inputs(layer_calls, own))
                result = functional_call(self._layers, weights, (fixed,))
                out.copy_(result.detach())
            with pool.records(backward):
                pairs = ((leaf, d_hidden), (own, d_beside))
                wanted = [(x, into) for x, into in pairs if x is not None and into is not None]
                with self._stack.deferred.deferring(hidden.device):
                    gradients = torch.autograd.grad(result, [*leaves, *(x for x, _ in wanted)], d_out)
                self._gradients.write(gradients[: len(leaves)])
                for (_, into), gradient in zip(wanted, gradients[len(leaves) :], strict=True):
                    into.copy_(gradient)
        return _Captured(forward, backward, hidden, beside, out, d_out, d_hidden, d_beside, layer_calls)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """The beginning of a buffer that holds the largest shape. Graphs of all shapes use the same ones."""
        if name not in self._buffers:
            a_token = like.numel() // (like.shape[0] * like.shape[1])
            self._buffers[name] = torch.empty(self._tokens * a_token, dtype=like.dtype, device=like.device)
        return self._buffers[name][: like.numel()].view(like.shape)

    # -- replay ----------------------------------------------------------------------------------------------

    def backward(self, captured: _Captured, d_out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Runs a backward graph and hands its gradients to the weights; returns those of the hidden states and of the
        layers' own inputs.
        """
        assert self._gradients is not None
        captured.d_out.copy_(d_out)
        self._gradients.make_room(self._trained)
        captured.backward.replay()
        self._gradients.hand_to(self._trained)
        found = [None if each is None else each.clone() for each in (captured.d_hidden, captured.d_beside)]
        return found[0], found[1]


class _Pool:
    """The memory in which graphs allocate, and the stream on which they are captured.

    ``torch.cuda.graph`` would give all cached memory back to the driver before each capture, for the next step to ask
    for it again.
    """

    def __init__(self, expected: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._handle = torch.cuda.graph_pool_handle()
        # Memory that is freed within a pool stays there as long as a graph of the pool lives: this one is never run.
        self._holder = torch.cuda.CUDAGraph()
        with self.records(self._holder):
            torch.empty(max(expected, 1), dtype=torch.uint8, device=device)[:1].zero_()

    @contextmanager
    def records(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures the block's launches as ``graph``."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Kernels of a new shape may be loaded now, which any stricter mode forbids.
            graph.capture_begin(pool=self._handle, capture_error_mode="relaxed")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # what work on another stream has begun cannot be ended, for example
                    graph.capture_end()
                raise
            graph.capture_end()

    def sizes(self) -> tuple[int, int]:
        """Memory of the device that belongs to the pool, and what of it is allocated now."""
        segments = torch.cuda.memory_snapshot(self._handle)
        return sum(int(each["total_size"]) for each in segments), sum(int(each["allocated_size"]) for each in segments)


class _Layers(nn.Module):
    """The layers of a stack as a module, whose weights can be exchanged for one call."""

    def __init__(self, stack: DecoderStack) -> None:
        super().__init__()
        self.layers = nn.ModuleList(stack.layers)
        self._run = stack.run

    def forward(self, call: StackCall) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self._run(call)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, runner: GraphRunner, captured: _Captured, hidden: Tensor, trained: Tensor, *beside: Tensor
    ) -> Tensor:
        ctx.runner, ctx.captured, ctx.inputs = runner, captured, len(beside)
        captured.forward.replay()
        return captured.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_beside = ctx.runner.backward(ctx.captured, d_out)
        return None, None, d_hidden, None, *([None] * ctx.inputs if d_beside is None else d_beside.unbind(2))


def _cacheless_autocast() -> torch.autocast:
    """Autocast as it is, without its cache: what a graph has cast must be cast in each replay."""
    enabled = torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", torch.get_autocast_dtype("cuda"), enabled=enabled, cache_enabled=False)


def _key(call: StackCall) -> _Key:
    """Everything that decides which kernels run, and their shapes."""
    layer_call = call.layer_calls[0]
    known = layer_call.mask.known
    documents = known is None or known.document_starts is not None
    branches = known is not None and known.branch_starts is not None
    angles = next((each.rotation[0] for each in call.layer_calls if each.rotation), call.hidden)
    own = _layer_inputs(call)
    beside = len(own), any(each.requires_grad for each in own)
    return call.hidden.shape, angles.shape, documents, branches, call.hidden.requires_grad, *beside


def _layer_inputs(call: StackCall) -> list[Tensor]:
    """The layers' own inputs, (B, S, P) each; none where they have none."""
    return [each.layer_input for each in call.layer_calls if each.layer_input is not None]


def _with_inputs(layer_calls: Sequence[LayerCall], beside: Tensor | None) -> tuple[LayerCall, ...]:
    """The calls of the first layers, which all are where each has one, with their parts of ``beside`` (B, S, layers,
    P).
    """
    if beside is None:
        return tuple(layer_calls)
    own, count = list(layer_calls), beside.shape[2]
    return (*(replace(one, layer_input=beside[:, :, n]) for n, one in enumerate(own[:count])), *own[count:])


def _rotation_id(layer_call: LayerCall) -> int:
    return id(layer_call.rotation[0]) if layer_call.rotation else 0


def _distinct(layer_calls: Sequence[LayerCall]) -> Iterator[tuple[int, LayerCall]]:
    """Each pair of a mask and a rotation once, with the number of a layer that has it."""
    seen: set[tuple[int, int]] = set()
    for index, layer_call in enumerate(layer_calls):
        pair = (id(layer_call.mask), _rotation_id(layer_call))
        if pair not in seen:
            seen.add(pair)
            yield index, layer_call


def _fixed(layer_calls: Sequence[LayerCall]) -> tuple[LayerCall, ...]:
    """The calls with rotations, and with masks' ranges, that graphs find in the same place in every replay."""
    rotations = {_rotation_id(call): tuple(x.clone() for x in call.rotation) for call in layer_calls}
    for _, layer_call in _distinct(layer_calls):
        _ = layer_call.mask.ranges  # made once, before the capture, and kept by the mask
    return tuple(
        replace(layer_call, rotation=rotations[_rotation_id(layer_call)], layer_input=None)
        for layer_call in layer_calls
    )


def _copy_in(captured: _Captured, call: StackCall) -> None:
    captured.hidden.copy_(call.hidden.detach())
    if captured.beside is not None:
        torch.stack([each.detach() for each in _layer_inputs(call)], dim=2, out=captured.beside)
    for index, layer_call in _distinct(call.layer_calls):
        fixed = captured.layer_calls[index]
        for into, given in zip(fixed.rotation, layer_call.rotation, strict=True):
            into.copy_(given)
        if layer_call.mask.known is None or layer_call.mask.known.document_starts is not None:
            for into, given in zip(_tensors(fixed.mask.ranges), _tensors(layer_call.mask.ranges), strict=True):
                into.copy_(given)


def _tensors(ranges: TokenRanges) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in ranges.tensors() if tensor is not None)


def keep_gradients_in(dtype: torch.dtype, parameters: Iterable[nn.Parameter]) -> None:
    """Has autograd keep the gradients of trained matrices in ``dtype``. Vectors, such as norms, are left as they are:
    they take no room, and each would be rounded by a kernel of its own.
    """
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim() > 1 and gradient_dtype(parameter) != dtype:
            parameter.grad_dtype = dtype


@dataclass(frozen=True, slots=True)
class Gradients:
    """One tensor for each weight, in its shape and its gradient's dtype: views of one buffer for each dtype."""

    buffers: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]

    @classmethod
    def zeros_like(cls, weights: Sequence[Tensor]) -> Gradients:
        sizes: dict[torch.dtype, int] = {}
        for weight in weights:
            dtype = gradient_dtype(weight)
            sizes[dtype] = sizes.get(dtype, 0) + weight.numel()
        device = weights[0].device
        return cls._over({dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in sizes.items()}, weights)

    @classmethod
    def _over(cls, buffers: Mapping[torch.dtype, Tensor], like: Sequence[Tensor]) -> Gradients:
        taken = dict.fromkeys(buffers, 0)
        tensors = []
        for tensor in like:
            dtype = gradient_dtype(tensor)
            start = taken[dtype]
            taken[dtype] += tensor.numel()
            tensors.append(buffers[dtype][start : taken[dtype]].view(tensor.shape))
        return cls(tuple(buffers.values()), tuple(tensors))

    def clone(self) -> Gradients:
        return self._over({buffer.dtype: buffer.clone() for buffer in self.buffers}, self.tensors)

    def write(self, gradients: Sequence[Tensor]) -> None:
        """Copies ``gradients``, one for each weight, into these."""
        torch._foreach_copy_(list(self.tensors), list(gradients))

    def make_room(self, weights: Sequence[Tensor]) -> None:
        """Moves gradients of an earlier micro-batch aside, before these tensors are written again."""
        if weights[0].grad is not None and weights[0].grad.data_ptr() == self.tensors[0].data_ptr():
            _assign(weights, self.clone().tensors)

    def hand_to(self, weights: Sequence[Tensor]) -> None:
        """Adds these to the weights' gradients, or makes them those of weights that have none."""
        if weights[0].grad is None:
            _assign(weights, self.tensors)
        else:
            torch._foreach_add_([w.grad for w in weights if w.grad is not None], list(self.tensors))


def _assign(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
