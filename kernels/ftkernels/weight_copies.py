"""Trained weights in the dtype of the products: cast once after each change instead of in every product.

The weights of a group lie one behind the other, so that its product is one (``projection.joined``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftkernels.projection import Projection, weight_tensors


class WeightCopies:
    """A copy of every trained weight of another dtype than its group's products, in memory that stays where it is.

    Args:
        groups: the projections of each group.
        dtype: of the groups' products.

    ``copies[i]`` belongs to ``groups[i]``: one (O, I) for each projection; none where the group needs no copies. They
    hold nothing before ``refresh``. ``pairs`` are all weights that have one, with it.
    """

    def __init__(self, groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> None:
        self.copies: list[tuple[Tensor, ...]] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self._fresh, self._dtype = False, dtype
        for group in groups:
            self.copies.append(self._of_group([t for t in weight_tensors(group)[::2] if t is not None], len(group)))

    def _of_group(self, weights: list[Tensor], count: int) -> tuple[Tensor, ...]:
        if len(weights) < count or all(weight.dtype == self._dtype for weight in weights):
            return ()
        first, rows = weights[0], [int(weight.shape[0]) for weight in weights]
        parts = torch.empty((sum(rows), int(first.shape[1])), dtype=self._dtype, device=first.device).split(rows)
        self.pairs += zip(weights, parts, strict=True)
        return parts

    def add(self, weight: Tensor) -> Tensor | None:
        """A copy of one more trained weight, of any shape; None where it has the products' dtype."""
        if weight.dtype == self._dtype:
            return None
        copy = torch.empty_like(weight, dtype=self._dtype, requires_grad=False)
        self.pairs.append((weight, copy))
        return copy

    def outdate(self) -> None:
        """The weights have changed and the copies have not: the next ``refresh`` copies them."""
        self._fresh = False

    def refresh(self) -> None:
        """Copies the weights as they are now, where they have changed since the last time."""
        if self.pairs and not self._fresh:
            torch._foreach_copy_([copy for _, copy in self.pairs], [weight.detach() for weight, _ in self.pairs])
        self._fresh = True
