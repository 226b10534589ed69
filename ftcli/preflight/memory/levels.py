"""How an estimate stands to a device's memory."""

from __future__ import annotations

from typing import Literal

from ftcli.facts.device import DeviceFacts

Level = Literal["fits", "tight", "does not fit", "unknown"]

#: Above this share of the memory a run may still fail on fragmentation or on another process.
TIGHT_SHARE = 0.9


def level_of(needed: int, device: DeviceFacts) -> Level:
    """``unknown`` where the device does not say what it has, ``tight`` above ``TIGHT_SHARE`` of it."""
    available = device.available_bytes
    if available is None:
        return "unknown"
    if needed > available:
        return "does not fit"
    return "tight" if needed > TIGHT_SHARE * available else "fits"
