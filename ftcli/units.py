"""Numbers, of bytes and times too, as text for people."""

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


def number(value: float) -> str:
    """A number for people, to four digits: 12,345 · 0.0123 · 1.5e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    if 1000 <= size < 1e12:
        return f"{value:,.0f}"
    if size < 1e-3 or size >= 1e12:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time in two units at most, without spaces: `32s`, `3m05s`, `12h34m`, `3d04h`."""
    whole = max(0, round(seconds))
    for unit, smaller, length, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // part:02d}{smaller}"
    return f"{whole}s"
