"""Best-fit packing: which rows share a sequence, so that little of it is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ftcli.data.tokens import Ints


@dataclass(frozen=True, slots=True)
class Packs:
    """``rows`` holds the rows of all packs one after the other; pack p is ``rows[ends[p - 1] : ends[p]]``."""

    rows: Ints
    ends: Ints

    def __len__(self) -> int:
        return len(self.ends)

    def members(self, pack: int) -> list[int]:
        """Rows of one pack."""
        start = int(self.ends[pack - 1]) if pack else 0
        return [int(row) for row in self.rows[start : int(self.ends[pack])]]

    def lengths(self, row_lengths: Ints) -> Ints:
        """Tokens of each pack."""
        running = np.concatenate(([0], row_lengths[self.rows].cumsum()))
        return np.diff(running[np.concatenate(([0], self.ends))])


def best_fit(lengths: Sequence[int] | Ints, capacity: int, rows: Sequence[int] | Ints | None = None) -> Packs:
    """Packs ``rows`` (all of ``lengths`` when None; a row may occur several times) by best-fit decreasing.

    Rows from the longest to the shortest, ties by position; each goes into the fullest pack that still has room, or
    opens a new one. At most 11/9 of the least number of packs, plus one (D. S. Johnson, "Near-optimal bin packing
    algorithms", MIT, 1973). Packs come in the order of their first row in ``rows``, rows in a pack likewise. A pure
    function of its arguments.

    Raises ValueError for a row that is empty or longer than ``capacity``.
    """
    chosen = np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[chosen]
    if len(sizes) and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"rows of {sizes.min()} to {sizes.max()} tokens do not fit packs of {capacity}")
    packs: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}  # by the room that is left
    rooms = 0  # bit r is set when a pack with room r is open: the smallest room that is enough is one shift away
    for position in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[position])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            pack = open_packs[room].pop()
            if not open_packs[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(position)
        left = room - size
        if left:
            open_packs.setdefault(left, []).append(pack)
            rooms |= 1 << left
    members = sorted(sorted(pack) for pack in packs)
    flat = np.fromiter((position for pack in members for position in pack), dtype=np.int64, count=len(sizes))
    return Packs(chosen[flat], np.cumsum([len(pack) for pack in members], dtype=np.int64))
