"""Rows of Parquet and Arrow files as Python objects, whatever their bytes and their columns hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ftcli.plain import JsonObject
from ftcli.rows.limits import limited_memory
from ftcli.rows.row import text_size
from ftcli.units import size

#: Rows that are read at a time, and most of them that are turned into Python objects at once.
_BATCH_ROWS = 64
#: Rows that are turned into objects first; twice as many each time that goes well.
_FEW_ROWS = 8
#: Bytes of addresses that reading a batch of rows may take, and turning some of them into objects. Encodings of both
#: formats name a value once for any number of rows, so a few kilobytes can mean any size, which no number in the file
#: need admit to. A quarter of a gigabyte is left where Arrow's allocator reserves one.
MAX_BATCH = 5 * 2**28
MAX_OBJECTS = 2**28
#: Characters that JSON needs for an item of a list.
_SHORTEST_ITEM = 2
#: A file may have that many rows whatever its size, and more if no byte of it stands for more of them than that.
MAX_ROWS = 10_000_000
MAX_ROWS_A_BYTE = 100
#: The same of characters. Tables of conversations pack to a hundredth where all of them begin alike.
MAX_TEXT = 2**30
MAX_TEXT_A_BYTE = 1000
#: What Arrow raises for values that Python has no counterpart of: dates beyond the year 9999, durations of more than a
#: billion days, time zones that nobody knows.
_NO_COUNTERPART = (ValueError, ArithmeticError, LookupError)


class Unreadable(Exception):
    """A cell that is neither a value of Python's nor text of Arrow's; the message names its column."""


def rows_before(source: Any, row: int) -> tuple[int, list[int]]:
    """Rows in the row groups of an open Parquet file that end before ``row``, counted from 1, or with it; and which
    groups follow. Raises as :func:`records`.
    """
    metadata = pq.ParquetFile(source).metadata
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    skipped = group = 0
    while group < len(sizes) and skipped + sizes[group] <= row:
        skipped, group = skipped + sizes[group], group + 1
    return skipped, list(range(group, len(sizes)))


def records(
    source: Any, *, parquet: bool, longest: int, groups: list[int] | None = None
) -> Iterator[JsonObject | Unreadable]:
    """The rows of a file that is open in Arrow.

    Args:
        longest: Most characters of one row.
        groups: Of a Parquet file, the row groups that are read; None: all.

    Raises pyarrow.ArrowException, OSError or ValueError for a file that is damaged, has two columns of one name, or
    means far more than it holds.
    """
    rows = characters = 0
    held = source.size()
    for batch in _bounded(_parquet(source, groups) if parquet else _ipc(source)):
        rows += batch.num_rows
        _require_few(rows, held)
        for row in _objects(batch, longest):
            characters += text_size(row)
            if characters > max(MAX_TEXT, MAX_TEXT_A_BYTE * held):
                raise ValueError(f"its rows would take more than {MAX_TEXT_A_BYTE:,} times its size")
            yield row


def _require_few(rows: int, held: int) -> None:
    if rows > max(MAX_ROWS, MAX_ROWS_A_BYTE * held):
        raise ValueError(f"it claims to have {rows:,} rows, more than {MAX_ROWS_A_BYTE} for each of its bytes")


def _bounded(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches. Raises ValueError where the next one takes more than :data:`MAX_BATCH`."""
    pa.allocate_buffer(1)  # Arrow's allocator reserves a gigabyte of addresses for the first byte
    while True:
        try:
            with limited_memory(MAX_BATCH):
                batch = next(batches, None)
                if batch is None:
                    return
                names = batch.schema.names
                if len(set(names)) != len(names):
                    raise ValueError(f"two of its columns have the same name; they are: {', '.join(names)}")
                batch.validate(full=True)  # else offsets of a damaged file would be followed wherever they lead
        except MemoryError as error:
            message = "a piece of it unpacks to more than a gigabyte; write it in smaller pages or batches"
            raise ValueError(message) from error
        yield batch


def _parquet(source: Any, groups: list[int] | None) -> Iterator[Any]:
    file = pq.ParquetFile(source)
    _require_few(file.metadata.num_rows, source.size())
    # One thread: the stacks of others count as memory, and what follows takes far more time than this.
    yield from file.iter_batches(_BATCH_ROWS, row_groups=groups, use_threads=False)


def _ipc(source: Any) -> Iterator[Any]:
    """Record batches of an Arrow file, or of an Arrow stream (what `datasets` writes)."""
    magic = source.read(6)
    source.seek(0)
    options = pa.ipc.IpcReadOptions(use_threads=False)
    if magic == b"ARROW1":
        reader = pa.ipc.open_file(source, options=options)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(source, options=options)


def _objects(batch: Any, longest: int) -> Iterator[JsonObject | Unreadable]:
    """The rows of a batch, a few at a time. Raises ValueError for one that is longer than ``longest`` characters."""
    start, few = 0, _FEW_ROWS
    while start < batch.num_rows:
        rows = _few_rows(batch.slice(start, few), longest)
        if rows is not None:
            yield from rows
            start, few = start + len(rows), min(2 * few, _BATCH_ROWS)
        elif few > 1:
            few = 1
        else:
            raise ValueError(f"it has a row of more than {size(longest)}")


def _few_rows(batch: Any, longest: int) -> list[JsonObject | Unreadable] | None:
    """The rows; None where they are too large to be looked at together, or one is too long."""
    try:
        with limited_memory(MAX_OBJECTS):
            if sum(map(_items, batch.columns)) > longest // _SHORTEST_ITEM:
                return None
            rows = list(_rows(batch))
    except MemoryError:
        return None
    return rows if all(isinstance(row, Unreadable) or text_size(row) <= longest for row in rows) else None


def _items(array: Any) -> int:
    """Number of items in all lists of a column, found without looking at any: a list of nulls needs no bytes."""
    kind = array.type
    if pa.types.is_struct(kind):
        return sum(_items(array.field(number)) for number in range(kind.num_fields))
    if pa.types.is_nested(kind) and hasattr(array, "flatten"):
        inner = array.flatten()
        return len(inner) + _items(inner)
    return 0


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
