"""Rows that are tokenized already: `input_ids` and `labels`, as trainers write and take them."""

from __future__ import annotations

from typing import Any

from ftcli.labels import IGNORE_INDEX
from ftcli.rows.limits import parse
from ftcli.rows.row import Example, Misfit, Row


def understand(row: Row) -> Example:
    """``{"input_ids": [...], "labels": [...], "attention_mask": ..., "position_ids": ...}``.

    A label is the id at its own place, or -100 for no loss: the loss shifts them, as transformers does. Padding (0 in
    ``attention_mask``) is taken away.
    """
    ids, labels = _ints(row, "input_ids"), _ints(row, "labels")
    if len(ids) != len(labels):
        raise Misfit(f"'input_ids' has {len(ids)} values and 'labels' {len(labels)}")
    wrong = next((n for n, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[n])), None)
    if wrong is not None:
        if labels[:-1] == ids[1:] or all(b in (IGNORE_INDEX, a) for a, b in zip(ids[1:], labels[:-1], strict=True)):
            raise Misfit("'labels' are shifted by one: give each token's own id, and the loss shifts them")
        raise Misfit(f"label {wrong + 1} is {labels[wrong]}, neither -100 nor the id {ids[wrong]} at its place")
    real = _real(row, ids, labels)
    positions = _ints(row, "position_ids") if row.fields.get("position_ids") is not None else None
    if positions is not None and [p for p, keep in zip(positions, real, strict=False) if keep] != list(
        range(sum(real))
    ):
        raise Misfit("'position_ids' begin anew inside of the row: give one document a row, and set data.packing")
    kept = [(i, label) for i, label, keep in zip(ids, labels, real, strict=True) if keep]
    if not kept:
        raise Misfit("'input_ids' is empty")
    return Example(row, input_ids=tuple(i for i, _ in kept), labels=tuple(label for _, label in kept))


def _real(row: Row, ids: list[int], labels: list[int]) -> list[bool]:
    """True for each position that is no padding."""
    if row.fields.get("attention_mask") is None:
        return [True] * len(ids)
    mask = _ints(row, "attention_mask")
    if len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise Misfit("'attention_mask' must have a 0 or a 1 for each token")
    inside = mask[mask.index(1) : len(mask) - mask[::-1].index(1)] if 1 in mask else []
    if 0 in inside:
        raise Misfit("'attention_mask' hides tokens between others, which is not supported")
    if any(label != IGNORE_INDEX for label, value in zip(labels, mask, strict=True) if not value):
        raise Misfit("'labels' train a token that 'attention_mask' hides")
    return [value == 1 for value in mask]


def _ints(row: Row, name: str) -> list[int]:
    value: Any = row.fields[name]
    if isinstance(value, str):  # CSV
        try:
            value = parse(value)
        except ValueError as error:
            raise Misfit(f"{name!r} is text that is not JSON: {error}") from error
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise Misfit(f"{name!r} must be a list of whole numbers")
    return value
