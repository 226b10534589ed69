"""Which words of a recipe this version supports; hints lead to no other, and preflight refuses the rest."""

from __future__ import annotations

from ftcli.config.model import SUPPORTED_ATTENTION
from ftcli.tables import engines, quantizations


def usable_values(key: str) -> tuple[str, ...] | None:
    """The usable values of a dotted key, as words; None where every value that the schema allows is usable."""
    if key == "model.attention":
        return SUPPORTED_ATTENTION
    if key == "launch.engine":
        return engines.supported()
    if key == "quantization.method":
        return quantizations.supported()
    return None
