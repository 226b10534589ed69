"""What the tests of estimates have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.estimates import Case


@pytest.fixture
def case(load: Callable[..., Any]) -> Callable[..., Case]:
    """Makes a case of a model's name, a recipe's further text, and overrides."""

    def _case(name: str, text: str, *overrides: str) -> Case:
        return Case(load(f"model: {{name_or_path: {name}}}\n{text}", *overrides))

    return _case
