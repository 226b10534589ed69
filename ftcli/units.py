"""Numbers of bytes as text for people."""

from __future__ import annotations

from typing import Literal

GIB = 2**30


def gib(count: float) -> str:
    """Bytes as a number of GiB, without the unit: one decimal, two below 1."""
    value = count / GIB
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def size(count: float, *, smallest: Literal["B", "KiB", "MiB"] = "B") -> str:
    """Bytes with the binary unit that fits, such as `1.50 MiB`; no unit below ``smallest`` is used."""
    for unit, factor in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= factor or unit == smallest:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"
