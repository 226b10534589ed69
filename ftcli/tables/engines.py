"""Engines: how the processes of a run work together. ``launch.engine`` names a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchEngine:
    """One engine.

    Attributes:
        run: Code: ``(work, session, processes) -> result``, runs ``work(group)``, where ``group`` are the ranks that
            work together, or None.
        processes: Most processes that it takes; None: any number.
    """

    run: str
    processes: int | None = None
    shards: bool = False


#: Chooses one of those that take any number of processes, by the memory estimate.
AUTO = "auto"

TABLE: Mapping[str, LaunchEngine] = {
    AUTO: LaunchEngine("ftcli.pipeline.launch:as_rank"),
    "single": LaunchEngine("ftcli.pipeline.launch:in_this_process", processes=1),
    "ddp": LaunchEngine("ftcli.pipeline.launch:as_rank"),
    "fsdp": LaunchEngine("ftcli.pipeline.launch:as_rank", shards=True),
}


def row(name: str) -> LaunchEngine:
    """The row of an engine. Raises KeyError for a name without one."""
    return TABLE[name]


def names() -> tuple[str, ...]:
    """Values of ``launch.engine``."""
    return tuple(TABLE)


def of_several() -> tuple[str, ...]:
    """Names of those for any number of processes, without `auto`."""
    return tuple(name for name in TABLE if name != AUTO and row(name).processes is None)


def by_auto(*, shards: bool) -> str:
    """The engine that `auto` becomes when weights are sharded, or are not: the first such row."""
    return next(name for name in of_several() if row(name).shards == shards)
