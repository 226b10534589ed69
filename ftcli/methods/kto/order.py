"""The order of an epoch of labelled answers, and what is said of their labels before training."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from ftcli.data.order import Epochs, Mixture, Packs, mixture
from ftcli.data.tokens import TokenizedRow, TokenTable
from ftcli.errors import Finding, FtcliError
from ftcli.methods.kto.losses import LabelSettings

#: The weighted ratio of desirable to undesirable answers that the paper advises (its equation 8).
LOWEST, HIGHEST = 1.0, 4 / 3
#: Answers that are named one by one where they have both labels.
_NAMED = 5


def labelled_epochs(table: TokenTable, weights: Sequence[float] | None, seed: int) -> Epochs:
    """Epochs in which wanted and unwanted answers are evenly interleaved: whatever is cut out of one holds both, in the
    proportion of the data to within one row of each. Its units are single rows of the table.

    Args:
        weights: One for each source, or None to see every row once.
    """
    wanted = table.values > 0
    sources = list(zip(table.starts[:-1], table.starts[1:], strict=True)) if weights else [(0, len(table))]
    strata, shares = [], []
    for (start, end), weight in zip(sources, weights or (1.0,), strict=True):
        for label in (True, False):
            rows = start + np.flatnonzero(wanted[start:end] == label)
            if len(rows):
                strata.append(rows)
                shares.append(weight * len(rows) / (end - start))
    sizes = tuple(len(rows) for rows in strata)
    counts = mixture(sizes, shares).counts if weights else sizes
    packs = Packs(np.concatenate(strata), np.arange(1, len(table) + 1, dtype=np.int64))
    return Epochs(table, Mixture(sizes, counts, weighted=True), packs, seed)


def label_counts(epochs: Epochs) -> tuple[int, int]:
    """Wanted and unwanted answers in an epoch."""
    starts = np.cumsum((0, *epochs.mix.sizes[:-1]))
    of_strata = [epochs.members(int(start))[0].value > 0 for start in starts]
    wanted = sum(count for count, label in zip(epochs.mix.counts, of_strata, strict=True) if label)
    return wanted, len(epochs) - wanted


def require_both_labels(table: TokenTable) -> None:
    """Raises FtcliError FT465 (exit 4) where all answers have one label: nothing tells the two kinds apart."""
    wanted = int((table.values > 0).sum())
    if 0 < wanted < len(table):
        return
    which, other = ("desirable", "undesirable") if wanted else ("undesirable", "desirable")
    message = f"all {len(table):,} answers are {which} and none is {other}"
    help = "to imitate good answers, use train.method: sft; else add rows with the other label"
    raise FtcliError.single("FT465", message, origin=table[0].row.origin, help=help)


def label_findings(wanted: int, unwanted: int, how: LabelSettings, rows_a_step: int) -> Iterator[Finding]:
    """FT466, a warning, for labels out of balance, and for a label that some steps will have no answer of."""
    ratio = how.desirable_weight * wanted / (how.undesirable_weight * unwanted)
    if not LOWEST * (1 - 1e-6) <= ratio <= HIGHEST * (1 + 1e-6):
        middle = (LOWEST + HIGHEST) / 2
        desirable, undesirable = how.desirable_weight * middle / ratio, how.undesirable_weight * ratio / middle
        yield Finding(
            "FT466",
            f"{wanted:,} desirable answers weigh {ratio:.3g} times as much as {unwanted:,} undesirable ones; KTO's "
            "authors advise 1 to 1.33",
            None,
            f"set preference.desirable_weight: {desirable:.2g}, or preference.undesirable_weight: {undesirable:.2g}",
            "warning",
        )
    fewer, name = min((wanted, "desirable"), (unwanted, "undesirable"))
    if fewer * rows_a_step < wanted + unwanted:
        yield Finding(
            "FT466",
            f"{fewer / (wanted + unwanted):.1%} of the answers are {name}: most steps of {rows_a_step} rows have none",
            None,
            "raise train.gradient_accumulation_steps, or give a source of such rows a `weight`",
            "warning",
        )


def contradictions(table: Sequence[TokenizedRow]) -> Iterator[Finding]:
    """FT467, a warning, for an answer that another row gives the other label."""
    seen: dict[bytes, int] = {}
    count = 0
    for index, row in enumerate(table):
        first = seen.setdefault(_digest(row), index)
        other = table[first] if first != index else row
        if other.value == row.value:
            continue
        count += 1
        if count <= _NAMED:
            message = f"this answer has the other label in {other.row.origin}: the two teach nothing together"
            yield Finding("FT467", message, row.row.origin, "remove one of them", "warning")
    if count > _NAMED:
        yield Finding("FT467", f"and {count - _NAMED:,} more answers like these", None, "remove one of each", "warning")


def _digest(row: TokenizedRow) -> bytes:
    return hashlib.blake2b(np.asarray(row.input_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
