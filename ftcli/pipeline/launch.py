"""How the processes of a run are started: the code of :mod:`ftcli.tables.engines`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_this_process(work: Callable[[], T], processes: int) -> T:
    """``single``: runs the work in this process. Preflight has refused recipes that ask for more than one."""
    return work()
