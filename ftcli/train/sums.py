"""Sums over what a step's micro-batches held, of which lines of metrics are means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ftcli.plain import JsonObject

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup


class StepSums:
    """A vector of sums since the last line of metrics, float64 on the device; the same on one process as on many ranks.

    Args:
        name: Its key in a checkpoint.
        width: Numbers in the vector.
    """

    def __init__(self, name: str, width: int, device: torch.device, group: RankGroup | None) -> None:
        self._name, self._width, self._device, self._group = name, width, device, group
        self._sums = self._before = torch.zeros(width, dtype=torch.float64, device=device)
        self._of_batches: list[Tensor] = []

    def begin(self) -> None:
        """A step begins; :meth:`undo` goes back to here."""
        self._before, self._of_batches = self._sums, []

    def add(self, vector: Tensor) -> None:
        """Notes a micro-batch, (width,) float64."""
        self._of_batches.append(vector)

    def reduce(self) -> None:
        """Adds up the micro-batches of all ranks, in the order of one process."""
        found = torch.stack(self._of_batches)
        if self._group is not None:
            slots = torch.zeros(len(found) * self._group.size, self._width, dtype=torch.float64, device=found.device)
            slots[self._group.rank :: self._group.size] = found
            self._group.all_reduce([slots])
            found = slots
        for one in found:
            self._sums = self._sums + one

    def add_once(self, vector: Tensor) -> None:
        """Adds what is the step's, and the same on all ranks."""
        self._sums = self._sums + vector

    def undo(self) -> None:
        """Forgets what came since :meth:`begin`."""
        self._sums = self._before

    def take(self) -> list[float]:
        """The sums; they begin anew."""
        found = self._sums.tolist()
        self._sums = torch.zeros_like(self._sums)
        return found

    def state(self) -> JsonObject:
        """For a checkpoint."""
        return {self._name: self._sums.tolist()}

    def restore(self, state: JsonObject) -> None:
        """Continues from what :meth:`state` gave; a checkpoint without it begins at zero."""
        kept = state.get(self._name)
        if isinstance(kept, list) and len(kept) == self._width:
            self._sums = torch.tensor(kept, dtype=torch.float64, device=self._device)
