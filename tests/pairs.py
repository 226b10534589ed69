"""Fewer parameters than all combinations, where nothing depends on three of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one choice each, in which any two choices of different parameters meet at least once.

    Takes, again and again, the first combination with the most pairs that have not met; the same in every run.
    """

    def met(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(indices), 2))

    combined = list(product(*(range(len(each)) for each in choices)))
    missing = set().union(*map(met, combined))
    chosen = []
    while missing:
        best = max(combined, key=lambda indices: len(met(indices) & missing))
        missing -= met(best)
        chosen.append(best)
    return [tuple(each[i] for each, i in zip(choices, indices, strict=True)) for indices in sorted(chosen)]
