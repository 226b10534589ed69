"""Options of commands that are not part of a recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What a benchmark times. None takes the recipe's value.

    Attributes:
        batch: Rows of a step.
        seq: Tokens of a row.
        lengths: Where the lengths of rows come from (:func:`ftcli.data.lengths.lengths_of`); None: all have ``seq``.
        layers: Decoder layers of the model.
        steps: Timed steps after the first; with 0 the first is reported.
        profile: Record one more step with torch's profiler.
        evaluation: Time `ftcli eval` instead of training: a step is one batch, forward only.
    """

    batch: int | None = None
    seq: int | None = None
    lengths: str | None = None
    layers: int | None = None
    steps: int = 10
    profile: bool = False
    evaluation: bool = False
