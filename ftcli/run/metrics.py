"""metrics.jsonl: one line per logging step, without gap or double line however often the run was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ftcli.errors import ExitCode, FtcliError
from ftcli.run.atomic import finite, json_bytes, storage_errors, write_bytes


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines; empty when there is no file. A half-written last line is left out.

    Raises:
        FtcliError: FT727 when a line is not the JSON of a map with an integer ``step``.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [row for row, _ in _rows(path, data)]


def _rows(path: Path, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    rows = []
    *lines, _unfinished = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise FtcliError.single(
                "FT727",
                f"{path}:{number}: this line is not a metric: {line[:80]!r}",
                exit_code=ExitCode.RECIPE,
                help="delete the damaged line; it costs one point of a curve",
            ) from error
        rows.append((row, line))
    return rows


class MetricsWriter:
    """Appends lines to metrics.jsonl; each is with the system when :meth:`write` returns."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open the file and drop what a resumed run will write again.

        Args:
            path: The file; made when it is missing.
            resume_step: Step of the checkpoint the run continues from. Lines of later steps and a half-written last
                line are cut off; 0 (a run from the start) empties the file.

        Raises:
            FtcliError: FT723 or FT724 when it cannot be written, FT727 when it holds something else.
        """
        self.path = path
        with storage_errors(path):
            if path.exists():
                data = path.read_bytes()
                kept = b"".join(line + b"\n" for row, line in _rows(path, data) if row["step"] <= resume_step)
                if resume_step == 0:
                    kept = b""
                if kept != data:
                    write_bytes(path, kept)
            self._file = path.open("ab")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append one line: ``step`` and ``values``. NaN and infinity become null.

        Raises:
            FtcliError: FT723 or FT724 when it cannot be written.
        """
        line = json_bytes(finite({"step": step, **values}))
        with storage_errors(self.path):
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Flush to the disk. To be called before a checkpoint is written, so that it never outlives its metrics."""
        with storage_errors(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        with storage_errors(self.path):
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
