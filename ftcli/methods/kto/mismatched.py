"""Mismatched rows: prompts with the answers to others, from which KTO's KL is estimated."""

from __future__ import annotations

from collections.abc import Sequence

from ftcli.data.tokens import TokenizedRow
from ftcli.labels import IGNORE_INDEX


def mismatched_rows(rows: Sequence[TokenizedRow], longest: int, most: int | None = None) -> list[TokenizedRow]:
    """The rows of :func:`mismatches`.

    Args:
        longest: Tokens that a row may have; answers are cut to fit. One token of each always does.
        most: How many are wanted, evenly spread over the rows; None: all.
    """
    return [mismatched_row(rows[asked], rows[answered], longest) for asked, answered in mismatches(rows, most)]


def mismatches(rows: Sequence[TokenizedRow], most: int | None = None) -> list[tuple[int, int]]:
    """The number of each row, whose prompt is taken, with that of the next row that has another prompt, whose answer
    is, in a circle; where no other row has another prompt, of the next row. A single row has no partner.

    Good answers come first: where both kinds answer one prompt, each kind is passed on to its own, and the answers that
    are compared with are as many of either label as the rows have.
    """
    if len(rows) < 2:
        return []
    order = sorted(range(len(rows)), key=lambda number: -rows[number].value)
    count = len(rows) if most is None else min(most, len(rows))
    partners = partners_of([tuple(rows[number].input_ids[: answer_start(rows[number])]) for number in order])
    chosen = (index * len(rows) // count for index in range(count))
    return [(order[index], order[partners[index]]) for index in chosen]


def partners_of(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """For each prompt the number of the next one that differs from it, in a circle; of the next one where none does."""
    size = len(prompts)
    following = [(index + 1) % size for index in range(size)]
    if all(prompt == prompts[0] for prompt in prompts):
        return following
    found = following.copy()
    # Twice round, from the end: what follows an equal prompt is what follows that one.
    for index in reversed(range(2 * size)):
        here, after = index % size, following[index % size]
        found[here] = found[after] if prompts[here] == prompts[after] else after
    return found


def answer_start(row: TokenizedRow) -> int:
    """The first token that is scored; what stands before it is the prompt, with the opening of the answer's turn."""
    return next(n for n in range(1, len(row.labels)) if row.labels[n] != IGNORE_INDEX)


def mismatched_row(row: TokenizedRow, other: TokenizedRow, longest: int) -> TokenizedRow:
    """The prompt of a row with the answer of another."""
    asked, begin = answer_start(row), answer_start(other)
    ids = [*row.input_ids[:asked], *other.input_ids[begin:]]
    labels = [*[IGNORE_INDEX] * asked, *other.labels[begin:]]
    return TokenizedRow(row.row, ids[:longest], labels[:longest])
