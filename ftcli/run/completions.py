"""completions/*.parquet: completions of each logging step of training by rewards, with their rewards.

One file a step, with the columns ``step``, ``prompt``, ``completion``, ``reasoning``, ``rewards/<name>`` for each
reward, and ``advantage``. In a long run they are thinned out: which stay depends on the steps alone, so a run that was
stopped and goes on has the files of one that was not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftcli.plain import JsonObject, number_or_none
from ftcli.run.atomic import TEMPORARY_PREFIX, read_bytes, storage_errors

_NAME = re.compile(r"step-(\d{8,})\.parquet")
_REWARD = "rewards/"
#: Far more than a step has; of a few bytes a damaged file can make any number.
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """One completion, without the ``reasoning`` before it; a reward that had no opinion is None."""

    prompt: str
    text: str
    rewards: Mapping[str, float | None]
    advantage: float | None = None
    reasoning: str | None = None

    @property
    def reward(self) -> float:
        """The sum of its rewards, without weights: for sorting."""
        return sum(value for value in self.rewards.values() if value is not None)


@dataclass(frozen=True, slots=True)
class Completions:
    """The folder of these files in a run directory. About ``most`` files stay; ``every``: steps from one logging step
    to the next.
    """

    folder: Path
    most: int | None = None
    every: int = 1

    def steps(self) -> list[int]:
        try:
            found = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except OSError:
            return []
        return sorted(int(match[1]) for match in found if match is not None)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.parquet"

    def write(self, step: int, completions: Sequence[ScoredCompletion]) -> None:
        """Writes a step's file, aside first. Raises FtcliError FT723 or FT724 when it cannot be written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = list(dict.fromkeys(name for one in completions for name in one.rewards))
        columns = {
            "step": pa.array([step] * len(completions), pa.int64()),
            "prompt": pa.array([_storable(one.prompt) for one in completions], pa.string()),
            "completion": pa.array([_storable(one.text) for one in completions], pa.string()),
            "reasoning": pa.array(
                [None if one.reasoning is None else _storable(one.reasoning) for one in completions], pa.string()
            ),
            **{
                _REWARD + name: pa.array([one.rewards.get(name) for one in completions], pa.float64()) for name in names
            },
            "advantage": pa.array([one.advantage for one in completions], pa.float64()),
        }
        path = self.path(step)
        aside = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
        with storage_errors(path):
            self.folder.mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), aside)
            aside.replace(path)
            self._thin_out(step)

    def read(self, step: int) -> list[ScoredCompletion]:
        """A step's completions; none where the file is missing or damaged."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(pa.BufferReader(read_bytes(self.path(step))))
            if file.metadata.num_rows > _MOST_ROWS:
                return []
            rows: list[JsonObject] = file.read().to_pylist()
        except (OSError, ValueError, pa.ArrowException):
            return []
        return [
            ScoredCompletion(
                str(row.get("prompt") or ""),
                str(row.get("completion") or ""),
                {k.removeprefix(_REWARD): number_or_none(value) for k, value in row.items() if k.startswith(_REWARD)},
                number_or_none(row.get("advantage")),
                None if row.get("reasoning") is None else str(row["reasoning"]),
            )
            for row in rows
        ]

    def forget_after(self, step: int) -> None:
        """Removes the files of later steps, which the run makes again, and half-written ones. Raises FtcliError
        FT723.
        """
        with storage_errors(self.folder):
            for later in self.steps():
                if later > step:
                    self.path(later).unlink(missing_ok=True)
            for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}step-*.parquet"):
                leftover.unlink(missing_ok=True)

    def _thin_out(self, newest: int) -> None:
        """Keeps of every 2, 4, 8 ... logging steps the first, as few as make it ``most``; the newest stays for now."""
        if self.most is None:
            return
        stride = 1
        while newest // self.every // stride >= self.most:
            stride *= 2
        if stride == 1:
            return
        taken = set()
        for step in self.steps():
            span = step // self.every // stride
            if span in taken and step != newest:
                self.path(step).unlink(missing_ok=True)
            taken.add(span)


def _storable(text: str) -> str:
    """Half of a surrogate pair, which UTF-8 cannot hold, becomes its escape."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
