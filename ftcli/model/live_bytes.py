"""Bytes of tensors that are alive while code runs, also of tensors without memory (torch's ``FakeTensorMode``)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A block in which the storages that are made are counted, each once and as long as it lives.

    Args:
        before: Tensors that were there before, such as weights: they are not counted.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self._numbers: dict[int, int] = {}
        self._before = [tensor.untyped_storage() for tensor in before]
        for storage in self._before:
            self._numbers[storage._cdata] = -1
        #: The number of a storage and the bytes that came or went with it.
        self._events: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        grouped = func is torch.ops.aten._grouped_mm.default
        out = _grouped(*args, **(kwargs or {})) if grouped else func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._numbers or not size:
            return
        number = self._numbers[address] = len(self._events)
        self.now += size
        self._events.append((number, size))
        weakref.finalize(storage, self._gone, address, number, size)

    def _gone(self, address: int, number: int, size: int) -> None:
        self._numbers.pop(address, None)
        self.now -= size
        self._events.append((number, -size))

    def mark(self) -> int:
        """The present, for :meth:`at` and :meth:`most`."""
        return len(self._events)

    def at(self, mark: int, *, without: Iterable[Tensor] = ()) -> int:
        """Bytes that were alive at a mark, ``without`` what holds these tensors now."""
        return self._series(0, mark, self._held(without))[-1]

    def most(self, begin: int, end: int, *, without: Iterable[Tensor] = ()) -> int:
        """The most bytes that were alive between two marks."""
        return max(self._series(begin, end, self._held(without)))

    def _held(self, tensors: Iterable[Tensor]) -> set[int]:
        return {self._numbers.get(tensor.untyped_storage()._cdata, -1) for tensor in tensors}

    def _series(self, begin: int, end: int, excluded: set[int]) -> list[int]:
        total, found = 0, []
        for index, (number, size) in enumerate(self._events[:end]):
            if index == begin:
                found.append(total)
            total += 0 if number in excluded else size
            if index >= begin:
                found.append(total)
        return [*found, total]


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """A tensor like the result of ``_grouped_mm``, whose rule for tensors without memory knows bfloat16 alone."""
    if a.dim() == 2 and b.dim() == 2:  # summed over the rows of each group
        assert offs is not None
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]))
    if a.dim() == 3 and b.dim() == 2:
        return a.new_empty((a.shape[1], b.shape[1]))
    return a.new_empty((*a.shape[:-1], b.shape[-1]))
