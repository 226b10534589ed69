"""Parameters of tests by tier: `make test` takes the telling ones, `make test-families` the others; CI runs both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest


def further(*values: Any) -> list[Any]:
    """Parameters of which a test has enough in `make test` without them."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def telling(kinds: Mapping[str, Any], *names: str) -> list[Any]:
    """Every one of ``kinds``, a value or a tuple of them by its id, of which `make test` takes those of these names.

    Raises:
        KeyError: a name that is none of them.
    """
    kinds = {name: value if isinstance(value, tuple) else (value,) for name, value in kinds.items()}
    taken = {name: kinds[name] for name in names}
    return [
        pytest.param(*value, id=name, marks=() if name in taken else pytest.mark.long) for name, value in kinds.items()
    ]


def in_turn(many: Sequence[Any], few: Sequence[Any], *, whole: Collection[Any] = (), ids: Any = str) -> list[Any]:
    """Pairs of one of ``many`` and one of ``few``. Of these `make test` takes one for each of ``many``, in turn, and
    all for those that are ``whole``. Those of ``many`` that take long do so with each of ``few``.
    """
    pairs, turn = [], 0
    for one in many:
        mark = getattr(one, "marks", ())
        value = one.values[0] if hasattr(one, "marks") else one
        for place, other in enumerate(few):
            long = not mark and value not in whole and place != turn % len(few)
            marks = (*mark, pytest.mark.long) if long else mark
            pairs.append(pytest.param(value, other, id=f"{ids(value)}-{ids(other)}", marks=marks))
        turn += not mark
    return pairs
