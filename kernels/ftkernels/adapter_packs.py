"""The adapters of many groups, packed at once: a few launches for a whole model instead of two for each adapter.

The layout, and the bits, are those of ``ftkernels.lowrank_plan``: rows of ``a`` are ``scaling * A``, multiplied in the
adapter's own dtype and rounded once; ``b`` holds the B above each other; what a smaller rank leaves is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ftkernels.limits import packed_rank
from ftkernels.projection import Packed, Projection


class AdapterPacks:
    """One ``Packed`` for each group, in memory that stays where it is. They hold nothing before ``refresh``.

    Args:
        groups: the projections of each group; those without an adapter take up zeros.
        dtype: of the groups' products.

    ``packs[i]`` belongs to ``groups[i]``; None where no projection of the group has an adapter.
    """

    def __init__(self, groups: Sequence[Sequence[Projection]], dtype: torch.dtype) -> None:
        self.packs: list[Packed | None] = []
        self._a: list[tuple[Tensor, Tensor, float]] = []  # from, to, scaling
        self._b: list[tuple[Tensor, Tensor]] = []
        for group in groups:
            self.packs.append(self._add(group, dtype))

    def _add(self, group: Sequence[Projection], dtype: torch.dtype) -> Packed | None:
        device = next((p.a.device for p in group if p.a is not None), None)
        if device is None:
            return None
        rank = packed_rank(max(p.rank for p in group))
        a = torch.zeros((len(group) * rank, int(group[0].weight.shape[1])), dtype=dtype, device=device)
        b = torch.zeros((sum(p.out_features for p in group), rank), dtype=dtype, device=device)
        row = 0
        for index, p in enumerate(group):
            if p.a is not None and p.b is not None:
                start = index * rank
                self._a.append((p.a.detach(), a[start : start + p.rank], p.scaling))
                self._b.append((p.b.detach(), b[row : row + p.out_features, : p.rank]))
            row += p.out_features
        return Packed(a, b)

    def refresh(self) -> None:
        """Copies the adapters as they are now into the packs."""
        if not self._a:
            return
        scaled = torch._foreach_mul([source for source, _, _ in self._a], [scaling for _, _, scaling in self._a])
        torch._foreach_copy_([target for _, target, _ in self._a], list(scaled))
        torch._foreach_copy_([target for _, target in self._b], [source for source, _ in self._b])
