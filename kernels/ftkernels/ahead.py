"""Quantised weights dequantised ahead: while one product runs, the matrix of the next is written on a second stream.

What comes next is learned, not configured: in training and in evaluation a model asks for the same groups of weights in
the same order again and again, so two requests in a row, each with its pass, tell the third. (One would not do:
backward asks in the opposite order, and under checkpointing forward products come between.) A wrong guess costs the
time of writing one matrix and nothing else: which numbers a product reads never depends on it.

Memory: one matrix more, at most. Each is allocated in the computing stream before the product that hides it is given
to the device, so whoever had the memory before is done when the second stream starts, and freed there after its own
product. Nothing is kept from one request to the next but the order.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class Filling(Protocol):
    """A quantised weight (O, I) that writes itself into memory given to it."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def stored(self) -> Tensor:
        """The tensor that tells this weight from every other as long as it lives."""
        ...

    def dequantize_into(self, out: Tensor) -> None: ...


@dataclass(slots=True)
class _Prepared:
    """A matrix for ``weights``, being written when ``done`` is set; ``fork``: from when on its memory may be."""

    weights: tuple[Filling, ...]
    matrix: Tensor
    fork: torch.cuda.Event | None
    done: torch.cuda.Event | None = None
    started: bool = False


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """Of a device, the stream on which matrices are written ahead."""
    return torch.cuda.Stream(index)


def write_matrix(weights: Sequence[Filling], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weights one behind the other in new memory, (sum O, I) in ``dtype``."""
    return _fill(weights, _memory(weights, dtype, device))


class Ahead:
    """The matrices of quantised weights, each written before it is asked for where the order of requests is known.

    One for the layers of a model on one device. Use: ``matrix`` for a product's weights, give the product to the
    device, ``start``. On a CPU, which has no streams, the next matrix is written at once: same numbers, nothing gained.

    ``hits`` counts the requests that found their matrix written or on the way.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._follows: dict[tuple[int, int], tuple[Filling, ...]] = {}
        self._recent: tuple[int, int] = (0, 0)
        self._prepared: list[_Prepared] = []  # one or none; a list, so that the finalizer can hold it
        self.hits = 0
        weakref.finalize(self, _drop, self._prepared).atexit = False

    def matrix(self, weights: Sequence[Filling], dtype: torch.dtype, *, back: bool = False) -> Tensor:
        """The weights one behind the other, (sum O, I) in ``dtype``, ready in the current stream.

        back: For the gradient of an input, not for an output.
        """
        asked = tuple(weights)
        self._follows[self._recent] = asked
        self._recent = (self._recent[1], _key(asked, back))
        found = self._take(asked, dtype)
        matrix = write_matrix(asked, dtype, self.device) if found is None else found
        following = self._follows.get(self._recent)
        if following is not None:
            memory = _memory(following, dtype, self.device)
            fork = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
            self._prepared.append(_Prepared(following, memory, fork))
        return matrix

    def start(self) -> None:
        """Writes the next matrix, beside what the current stream was given since ``matrix``."""
        for next_one in self._prepared:
            next_one.started = True
            if next_one.fork is None:
                _fill(next_one.weights, next_one.matrix)
                continue
            side = _stream(next_one.matrix.device.index)
            side.wait_event(next_one.fork)
            with torch.cuda.stream(side):
                _fill(next_one.weights, next_one.matrix)
            next_one.done = side.record_event()

    def forget(self) -> None:
        """The order of requests, and with it every weight that is held here: for weights that are to move."""
        _drop(self._prepared)
        self._follows.clear()
        self._recent = (0, 0)

    def _take(self, asked: tuple[Filling, ...], dtype: torch.dtype) -> Tensor | None:
        """The prepared matrix, if it is the one that is asked for."""
        if not self._prepared:
            return None
        ready = self._prepared[0]
        same = len(ready.weights) == len(asked) and all(
            mine.stored is theirs.stored for mine, theirs in zip(ready.weights, asked, strict=True)
        )
        _drop(self._prepared)
        if not ready.started or not same or ready.matrix.dtype != dtype:
            return None
        self.hits += 1
        return ready.matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        """A copy of a model learns the order of its own weights."""
        return Ahead(self.device)

    def __reduce__(self) -> tuple[type[Ahead], tuple[torch.device]]:
        return Ahead, (self.device,)


def _drop(prepared: list[_Prepared]) -> None:
    """Lets the matrix go, for use or for good: the current stream waits until it is written."""
    for one in prepared:
        if one.done is not None:
            torch.cuda.current_stream(one.matrix.device).wait_event(one.done)
    prepared.clear()


def _key(weights: tuple[Filling, ...], back: bool) -> int:
    return hash((back, *(id(weight.stored) for weight in weights)))


def _memory(weights: Sequence[Filling], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows, columns = sum(int(weight.shape[0]) for weight in weights), int(weights[0].shape[1])
    return torch.empty((rows, columns), dtype=dtype, device=device)


def _fill(weights: Sequence[Filling], matrix: Tensor) -> Tensor:
    for weight, part in zip(weights, matrix.split([int(weight.shape[0]) for weight in weights]), strict=True):
        weight.dequantize_into(part)
    return matrix
