"""Saving an operation's input before the operation runs, so that an activation checkpoint need not run it again.

``torch.utils.checkpoint`` (``use_reentrant=False``) stops its second forward at the last tensor that was saved. An
operation that saves its input when it is done is therefore run again whole, though backward may need the input alone.
Saved by a node of its own in front, the second forward stops before the operation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Early:
    """An input that was saved early, for one call: ``Early.save`` in front of the operation, ``tensor`` in backward."""

    __slots__ = ("_node", "_plain")

    def __init__(self) -> None:
        self._node: Any = None
        self._plain: Tensor | None = None

    def save(self, z: Tensor) -> Tensor:
        """``z`` for the operation to read; its gradient passes through unchanged."""
        if not (z.requires_grad and torch.is_grad_enabled()):
            self._plain = z  # no node is recorded for it
            return z
        out: Tensor = _Save.apply(self, z)  # type: ignore[no-untyped-call]
        return out

    def tensor(self) -> Tensor:
        """What was saved, unpacked: a checkpoint around it runs again up to here. Once in a backward pass."""
        if self._node is None:
            assert self._plain is not None
            return self._plain
        (z,) = self._node.saved_tensors
        return z  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, early: Early, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        early._node = ctx
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[None, Tensor]:
        return None, dz
