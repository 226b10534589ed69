"""Optimizers: what ``train.optim`` may name. transformers builds them by the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What the rest of the program has to know of an optimizer.

    Attributes:
        state_bytes: Bytes of state for each trained parameter.
        factored: The state of a matrix is one float32 sum for each row and each column; ``state_bytes`` is 0.
        foreach: On a GPU it updates all parameters at once, which needs a temporary float32 copy of them.
        reads: Which settings of the section ``train`` it reads, of those that not every optimizer reads.
    """

    state_bytes: int = 0
    factored: bool = False
    foreach: bool = False
    reads: tuple[str, ...] = ()


_ADAM_SETTINGS = ("adam_beta1", "adam_beta2", "adam_epsilon")

TABLE: Mapping[str, Optimizer] = MappingProxyType(
    {
        "adamw_torch": Optimizer(state_bytes=8, foreach=True, reads=_ADAM_SETTINGS),
        "adamw_torch_fused": Optimizer(state_bytes=8, reads=_ADAM_SETTINGS),
        "sgd": Optimizer(),
        "adafactor": Optimizer(factored=True),
    }
)


def names() -> tuple[str, ...]:
    """What a recipe may say."""
    return tuple(TABLE)


def row(name: str) -> Optimizer:
    """The row of an optimizer that a recipe names."""
    return TABLE[name]


def settings() -> tuple[str, ...]:
    """Every setting that some optimizer reads, in the order of the table."""
    return tuple(dict.fromkeys(setting for each in TABLE.values() for setting in each.reads))
