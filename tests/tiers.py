"""Parameters of tests by tier: `make test` takes the telling ones, `make test-families` the others; CI runs both."""

from __future__ import annotations

from collections.abc import Mapping
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
