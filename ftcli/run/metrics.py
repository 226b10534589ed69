"""metrics.jsonl: one line per logging step, without gap or double line however often the run was interrupted."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ftcli.errors import FtcliError
from ftcli.plain import JsonObject, is_number, parsed_map, plain
from ftcli.run.atomic import json_bytes, open_regular, read_bytes, storage_errors, write_bytes

#: A line of metrics.jsonl: ``step``, and values by name. Tasks, rewards and datasets have names of the recipe's.
MetricsLine: TypeAlias = Mapping[str, Any]


#: A run of a million steps has 300 MB of lines, each of a few hundred bytes.
_MOST_BYTES, _MOST_LINE_BYTES = 1 << 30, 1 << 20
_LAST_STEP = 2**53


@dataclass(frozen=True, slots=True)
class ReadMetrics:
    """Content of a metrics file: its sound lines in order, and what is wrong with the rest (empty: nothing).

    Every value is a number that is finite, or None.
    """

    lines: Sequence[MetricsLine]
    damage: str = ""


def read_metrics(path: Path) -> ReadMetrics:
    """All complete lines; none when there is no file. A half-written last line is left out, and is no damage."""
    found: list[MetricsLine] = []
    faults: list[str] = []
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                return ReadMetrics((), f"it is larger than {_MOST_BYTES >> 30} GiB")
            number = 0
            while (line := file.readline(_MOST_LINE_BYTES)).endswith(b"\n") or len(line) == _MOST_LINE_BYTES:
                number += 1
                row = _parsed(line)
                if row is None:
                    faults.append(f"line {number} is not a metric")
                    continue
                values = {name: value if is_number(value) else None for name, value in row.items()}
                faults += [
                    f"line {number} has a {name} that is no number"
                    for name, value in values.items()
                    if value is None and row[name] is not None
                ][:1]
                found.append({**values, "step": row["step"]})
    except FileNotFoundError:
        return ReadMetrics(())
    except OSError as error:
        return ReadMetrics((), error.strerror or str(error))
    more = f", and {len(faults) - 1} more lines are damaged" if len(faults) > 1 else ""
    return ReadMetrics(found, f"{faults[0]}{more}" if faults else "")


def _rows(path: Path, data: bytes) -> list[tuple[MetricsLine, bytes]]:
    rows: list[tuple[MetricsLine, bytes]] = []
    *lines, _unfinished = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = _parsed(line)
        if row is None:
            help = "delete the damaged line; it costs one point of a curve"
            raise FtcliError.single("FT727", f"{path}:{number}: this line is not a metric: {line[:80]!r}", help=help)
        rows.append((row, line))
    return rows


def _parsed(line: bytes) -> JsonObject | None:
    """A line's map, or None when it is no metric."""
    row = parsed_map(line)
    step = None if row is None else row.get("step")
    sound = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= _LAST_STEP
    return row if sound else None


def _without_torn_tail(data: bytes) -> bytes:
    """``data`` up to the last line that is a metric: what follows was never flushed, and a power cut can leave anything
    there.
    """
    lines = data.split(b"\n")[:-1]
    while lines and _parsed(lines[-1]) is None:
        lines.pop()
    return b"".join(line + b"\n" for line in lines)


class MetricsWriter:
    """Appends lines to metrics.jsonl. When :meth:`write` returns, the system has the whole line, or none of it."""

    def __init__(self, path: Path, *, resume_step: int = 0, evaluate_again: bool = False) -> None:
        """Opens the file and drops what a resumed run will write again: a torn end and the lines after ``resume_step``
        (0 empties it) and, with ``evaluate_again``, that step's evaluation. Raises FtcliError FT723 or FT724 when it
        cannot be written, FT727 when it holds something else.
        """
        self.path = path
        self._descriptor: int | None = None
        with storage_errors(path):
            if path.exists():
                data = read_bytes(path, _MOST_BYTES)
                rows = _rows(path, _without_torn_tail(data)) if resume_step else []
                kept = [
                    line
                    for row, line in rows
                    if row["step"] < resume_step
                    or (row["step"] == resume_step and ("loss" in row or not evaluate_again))
                ]
                content = b"".join(line + b"\n" for line in kept)
                if content != data:
                    write_bytes(path, content)
            self._descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, step: int, values: MetricsLine) -> None:
        """Append one line: ``step`` and ``values``. NaN and infinity become null. Raises FtcliError FT723 or FT724,
        also where the file has vanished.
        """
        line = json_bytes(plain({"step": step, **values}))
        descriptor = self._open_descriptor()
        with storage_errors(self.path):
            before = self._size_of_what_is_there(descriptor)
            try:
                written = 0
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                os.ftruncate(descriptor, before)  # no half line stays
                raise

    def sync(self) -> None:
        """Flush to the disk. To be called before a checkpoint is written, so that it never outlives its metrics."""
        descriptor = self._open_descriptor()
        with storage_errors(self.path):
            self._size_of_what_is_there(descriptor)
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with storage_errors(self.path):
                os.close(descriptor)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptor

    def _size_of_what_is_there(self, descriptor: int) -> int:
        """The file's size. Raises OSError when it was deleted: it would go on taking lines, which nobody could read."""
        ours = os.fstat(descriptor)
        try:
            there = self.path.stat()
        except FileNotFoundError as error:
            raise OSError(errno.ENOENT, "the run directory has vanished while the run was going on") from error
        if (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(errno.ESTALE, "the file was replaced while the run was going on")
        return ours.st_size

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
