"""Saving an operation's input before the operation runs, so that an activation checkpoint need not run it again.

Backward under ``torch.utils.checkpoint`` (``use_reentrant=False``) runs the forward a second time, as far as the last
tensor that the first one saved. An operation that saves its input at its end therefore runs again as a whole, even when
its backward needs nothing but that input. Here a node of its own, in front of the operation, saves the input, and the
second forward stops there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class EarlySave:
    """Holds the input of one call: ``save`` is called in front of the operation, ``tensor`` in its backward."""

    __slots__ = ("_node", "_plain")

    def __init__(self) -> None:
        self._node: Any = None
        self._plain: Tensor | None = None

    def save(self, z: Tensor) -> Tensor:
        """Saves ``z`` and returns it for the operation to read. Its gradient passes through unchanged."""
        if not (z.requires_grad and torch.is_grad_enabled()):
            self._plain = z  # no node is recorded for it
            return z
        out: Tensor = _Save.apply(self, z)  # type: ignore[no-untyped-call]
        return out

    def tensor(self) -> Tensor:
        """The saved tensor. In a checkpointed layer this recomputes the forward, so ask once a backward pass."""
        if self._node is None:
            assert self._plain is not None
            return self._plain
        (z,) = self._node.saved_tensors
        return z  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, early: EarlySave, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        early._node = ctx
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[None, Tensor]:
        return None, dz
