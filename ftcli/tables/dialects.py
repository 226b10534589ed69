"""Tools whose recipes `ftcli recipes convert` turns into ours. One row each.

What their keys are called here stands once, in :mod:`ftcli.config.dialects`; the code of a row says what needs more
than another name, and which defaults of the tool are not ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """One tool whose recipes the converter reads: its name in messages, and its
    :class:`ftcli.config.conversion.rules.Rules`.
    """

    title: str
    code: str


TABLE: Mapping[str, Dialect] = {
    "axolotl": Dialect("axolotl", "ftcli.config.conversion.axolotl:RULES"),
    "llama-factory": Dialect("LLaMA-Factory", "ftcli.config.conversion.llama_factory:RULES"),
    "torchtune": Dialect("torchtune", "ftcli.config.conversion.torchtune:RULES"),
    "trl": Dialect("TRL", "ftcli.config.conversion.trl:RULES"),
    "unsloth": Dialect("Unsloth", "ftcli.config.conversion.unsloth:RULES"),
}


def names() -> tuple[str, ...]:
    """Values of ``--from``."""
    return tuple(TABLE)


def row(name: str) -> Dialect:
    return TABLE[name]
