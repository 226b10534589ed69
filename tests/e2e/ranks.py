"""Several ranks of one run as drills (drill.py): processes like those that `ftcli train --gpus N` starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.drill import Drill
from tests.e2e.resilience import Drills, Preparation

#: What torch's C++ says when the port closes that a rank is about to use: rank 0 ended before they met.
_OF_TORCH = re.compile(
    r"\[[EW]\d{4} .*(\[c10d\]|TCPStore\.cpp|socket\.cpp)|Exception raised from |frame #\d+:|<omitting |$"
)


@dataclass(frozen=True)
class Ranks:
    """The ranks of one run; ``folder`` is where their launcher leaves word."""

    drills: tuple[Drill, ...]
    folder: Path

    def ended(self) -> list[int]:
        """The exit statuses, in order of the ranks."""
        statuses = [drill.wait() for drill in self.drills]
        for rank, drill in enumerate(self.drills):
            assert "Traceback" not in drill.said, drill.said
            own = [line for line in drill.said.splitlines() if not _OF_TORCH.match(line)]
            assert rank == 0 or not own, drill.said
        return statuses

    @property
    def said(self) -> str:
        """What rank 0 has printed."""
        return self.drills[0].said


def start_ranks(
    drills: Drills,
    recipe: str,
    count: int,
    *words: str,
    prepared: Mapping[int, tuple[Preparation, ...]] | None = None,
    environment: Mapping[str, str] | None = None,
    command: str = "train",
    hosts: int = 1,
    cache: Path | None = None,
) -> Ranks:
    """Starts the command as ``count`` ranks, some of them prepared, as ftcli does, or as the launcher does that has
    set ``environment``; as if they were on several ``hosts``; with a ``cache`` of their own.
    """
    folder = drills.folder / f"ranks-{sum(1 for _ in drills.folder.glob('ranks-*'))}"
    folder.mkdir()
    started = []
    for rank in range(count):
        place = {
            **(environment or {"FTCLI_GROUP": str(folder)}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % (count // hosts)),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count // hosts),
            "FTCLI_CACHE": drills.server.cache if cache is None else str(cache),
        }
        started.append(
            drills.server.start(
                *(command, recipe, "--offline", *words),
                cwd=drills.folder,
                preparations=(prepared or {}).get(rank, ()),
                environment=place,
            )
        )
    return Ranks(tuple(started), folder)


def run_ranks(drills: Drills, recipe: str, count: int, *words: str, command: str = "train", hosts: int = 1) -> Ranks:
    """Trains to the end."""
    ranks = start_ranks(drills, recipe, count, *words, command=command, hosts=hosts)
    assert ranks.ended() == [0] * count, ranks.said
    return ranks
