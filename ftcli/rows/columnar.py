"""Rows of Parquet and Arrow files as Python objects, whatever their bytes and their columns hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ftcli.plain import JsonObject

#: Rows that are turned into Python objects at a time.
_BATCH_ROWS = 512
#: What Arrow raises for values that Python has no counterpart of: dates beyond the year 9999, durations of more than a
#: billion days, time zones that nobody knows.
_NO_COUNTERPART = (ValueError, ArithmeticError, LookupError)


class Unreadable(Exception):
    """A cell that is neither a value of Python's nor text of Arrow's; the message names its column."""


def records(source: Any, *, parquet: bool) -> Iterator[JsonObject | Unreadable]:
    """The rows of a file that is open in Arrow.

    Raises pyarrow.ArrowException, OSError or ValueError for a file that is damaged or has two columns of one name.
    """
    for batch in pq.ParquetFile(source).iter_batches(_BATCH_ROWS) if parquet else _ipc(source):
        names = batch.schema.names
        if len(set(names)) != len(names):
            raise ValueError(f"two of its columns have the same name; they are: {', '.join(names)}")
        batch.validate(full=True)  # else offsets of a damaged file would be followed wherever they lead
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            yield from _rows(batch.slice(start, _BATCH_ROWS))


def _ipc(source: Any) -> Iterator[Any]:
    """Record batches of an Arrow file, or of an Arrow stream (what `datasets` writes)."""
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(source)


def _rows(batch: Any) -> Iterator[JsonObject | Unreadable]:
    try:
        yield from batch.to_pylist()
    except _NO_COUNTERPART:
        for number in range(batch.num_rows):
            try:
                yield {name: _cell(name, batch.column(name)[number]) for name in batch.schema.names}
            except Unreadable as problem:
                yield problem


def _cell(name: str, cell: Any) -> Any:
    """The cell's value; the text that Arrow writes for it where Python has no such value."""
    try:
        return cell.as_py()
    except _NO_COUNTERPART as error:
        try:
            return cell.cast(pa.string()).as_py()
        except (*_NO_COUNTERPART, pa.ArrowException):
            raise Unreadable(f"column {name!r} holds a {cell.type} that Python cannot hold: {error}") from error
