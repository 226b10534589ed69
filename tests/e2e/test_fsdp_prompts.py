"""Methods on prompts with weights that are sharded over ranks (``launch.engine: fsdp``): the run of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_ranks_grpo import CHANGE, twice

FSDP: dict[str, Any] = {"launch": {"engine": "fsdp"}}


def test_x(drills: Drills) -> None:
    change = merged(CHANGE, FSDP)
    alone = drills.whole("grpo", **twice(change))
    ranks = run_ranks(drills, drills.recipe("two", **change), 2, command="grpo")
    print(ranks.said)
    assert drills.metrics("two") == drills.metrics(alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
