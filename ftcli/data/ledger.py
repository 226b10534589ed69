"""Counts what became of every row and token, so that nothing is cut or masked without a word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DatasetLedger:
    """One dataset's account, in rows and tokens.

    ``tokens`` are those kept (supervised and masked); ``cut_tokens`` were removed by truncation,
    ``dropped_tokens`` belonged to rows that were dropped. Length quantiles are over all rows, before any cut.
    """

    name: str
    layout: str
    rows: int
    kept_rows: int
    dropped_rows: int
    truncated_rows: int
    tokens: int
    supervised_tokens: int
    cut_tokens: int
    dropped_tokens: int
    length_quantiles: dict[str, int]

    @property
    def masked_tokens(self) -> int:
        """Kept tokens without loss."""
        return self.tokens - self.supervised_tokens

    def as_dict(self) -> dict[str, Any]:
        """For tokens.json."""
        return {**asdict(self), "masked_tokens": self.masked_tokens}


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Minimum, median, 90th and 99th percentile (nearest rank) and maximum."""
    ordered = sorted(lengths)
    if not ordered:
        return {}

    def rank(percent: int) -> int:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return {"min": ordered[0], "p50": rank(50), "p90": rank(90), "p99": rank(99), "max": ordered[-1]}
