"""The gradient of an embedding whose weight is the head's as well, in one tensor instead of two and their sum.

The head's gradient (V, H) is dense and comes first in a backward pass; the embedding's has a row for each token and
comes last. Autograd would make the second one dense, zeros for the most part, and add the two. Here the head hands its
own over, and the embedding adds its rows to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class HeadGradient:
    """The head's gradient on its way to the embedding's backward pass."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def put(self, gradient: Tensor) -> None:
        """Hands over the head's share, which is the taker's to write on.

        Raises RuntimeError when an earlier one was never taken: it would be missing from the weight's gradient.
        """
        if self._held is not None:
            self._held = None
            raise RuntimeError("a head's gradient was handed over, and its embedding had no backward pass")
        self._held = gradient

    def take(self) -> Tensor | None:
        """Returns the gradient that was handed over, once."""
        held, self._held = self._held, None
        return held


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, head: HeadGradient, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.head, ctx.shape, ctx.dtype, ctx.padding_idx = head, weight.shape, weight.dtype, padding_idx
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:  # whose row learns nothing here
            dy = dy.masked_fill((ids == ctx.padding_idx)[..., None], 0.0)
        total = ctx.head.take()
        if total is None:
            total = torch.zeros(ctx.shape, dtype=ctx.dtype, device=dy.device)
        # Sorted by id, and added in that order: the same bits in every run.
        total.index_put_((ids.reshape(-1),), dy.reshape(-1, dy.shape[-1]).to(total.dtype), accumulate=True)
        return total.to(ctx.dtype), None, None, None


def tied_embedding(ids: Tensor, weight: Tensor, head: HeadGradient, padding_idx: int | None = None) -> Tensor:
    """``weight[ids]``, (...) int64 -> (..., H), whose backward pass adds to what ``head`` was handed, if anything.

    ``padding_idx``: as in ``torch.nn.functional.embedding``.
    """
    found: Tensor = _Lookup.apply(weight, ids, head, padding_idx)
    return found
