"""How many examples a property is tried on."""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import settings

#: Seconds for all properties together; 0 is the short form that `make test` runs.
SECONDS = float(os.environ.get("FUZZ_SECONDS") or 0)
#: Examples that one round of the long form makes, after which the clock is looked at.
_ROUND = 60


def examples(short: int, long: int = _ROUND) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings of a property: ``short`` examples in `make test`; ``long`` in each round of `make fuzz`."""
    return settings(max_examples=long if SECONDS else short)
