"""Options of commands that are not part of a recipe."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Shape of a benchmark. None takes the recipe's value.

    ``batch`` rows of ``seq`` tokens in each step, ``layers`` of the model's layers, ``steps`` timed after the first
    (0: the first is all there is).
    ``profile`` adds a step that is recorded by torch's profiler. ``evaluation`` times `ftcli eval` instead of training:
    a step is one batch, forward only.
    """

    batch: int | None = None
    seq: int | None = None
    layers: int | None = None
    steps: int = 10
    profile: bool = False
    evaluation: bool = False
