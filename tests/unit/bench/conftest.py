"""The measurements of `kernels/bench` as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "kernels" / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a script by its name; their plain names are forgotten at the end."""
    before = set(sys.modules)
    path = list(sys.path)
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    sys.path[:] = path
    for name in {file.stem for file in BENCH.glob("*.py")} - before:
        sys.modules.pop(name, None)
