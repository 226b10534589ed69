"""Rows of one file, each with its number; what is wrong with a single row does not end the reading.

Files are read here and not by `datasets`, whose JSON and CSV readers guess one schema for all rows and cannot say in
which line a fault lies. Parquet and Arrow are read by pyarrow in batches, so that memory stays bounded.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import IO, Any, TypeAlias, TypeVar, cast

from ftcli.errors import FtcliError, Origin
from ftcli.plain import JsonObject
from ftcli.rows.limits import TooDeep, is_shallow, parse, parse_list
from ftcli.rows.places import DataFile
from ftcli.rows.row import data_error

#: Longest line of JSON Lines in bytes, and of CSV in characters: several books. A compressed file of a megabyte can
#: hold a line of a gigabyte, and tokenizing took 200 bytes for each byte of it (the byte-level tokenizer, CPU).
MAX_LINE = 16 * 2**20
#: Most bytes that a compressed file may unpack to, if it has to be in memory as a whole.
MAX_UNPACKED = 256 * 2**20
Line = TypeVar("Line", str, bytes)
_Rows: TypeAlias = Generator[tuple[int, Any], None, None]
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that could not be read, and why."""

    reason: str


def read_file(file: DataFile, after: int = 0) -> Iterator[tuple[int, Any]]:
    """Number and value (or :class:`BrokenRow`) of each row behind that with the number ``after``. Raises FtcliError
    FT403 when the file itself is broken.
    """
    import zlib

    try:
        with ExitStack() as stack:
            stream: IO[bytes] = stack.enter_context(file.path.open("rb"))
            if file.compressed:
                stream = cast("IO[bytes]", stack.enter_context(gzip.open(stream)))
            if file.kind == ".jsonl":
                rows = _lines(stream, file, after)
            elif file.kind == ".json":
                rows = _document(stream, file)
            elif file.kind in (".csv", ".tsv"):
                rows = _table(stream, file)
            else:
                rows = _columns(stream, file, after)
            stack.enter_context(closing(rows))  # before the stream, also of who is told no more rows
            yield from (row for row in rows if row[0] > after) if after else rows
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, csv.Error) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: DataFile, error: object) -> FtcliError:
    help = "check that the file is complete, that its name says what it is, and that you may read it"
    return data_error("FT403", f"{file.name} cannot be read: {error}", Origin(file.name), help)


def _lines(stream: IO[bytes], file: DataFile, after: int) -> _Rows:
    for number, line in enumerate(_bounded(lambda: stream.readline(MAX_LINE + 1), file), 1):
        if number == 1:
            if line.startswith(_BYTE_ORDER_MARKS):
                raise _unreadable(file, "it is UTF-16; save it as UTF-8")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if number > after and line.strip():
            yield number, _parsed(line)


def _bounded(read: Callable[[], Line], file: DataFile) -> Iterator[Line]:
    """The lines that ``read`` gives, up to an empty one. Raises FtcliError FT403 for one that is too long."""
    while line := read():
        if len(line) > MAX_LINE:
            raise _unreadable(file, f"it has a line of more than {MAX_LINE >> 20} MiB")
        yield line


def _whole(stream: IO[bytes], file: DataFile) -> bytes:
    """All of a file. Raises FtcliError FT403 for a compressed one that unpacks to more than :data:`MAX_UNPACKED`."""
    content = stream.read(MAX_UNPACKED + 1) if file.compressed else stream.read()
    if file.compressed and len(content) > MAX_UNPACKED:
        raise _unreadable(file, f"it unpacks to more than {MAX_UNPACKED >> 20} MiB; unpack it, or use .jsonl.gz")
    return content


def unpacks_beyond(file: DataFile, limit: int) -> bool:
    """True if a compressed file holds more than ``limit`` bytes. Raises OSError, EOFError or zlib.error if broken."""
    with gzip.open(file.path) as stream:
        while limit >= 0:
            read = len(stream.read(2**20))
            if not read:
                return False
            limit -= read
    return True


def _parsed(line: bytes) -> Any:
    try:
        return parse(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        return BrokenRow(f"not UTF-8: {error.reason} at byte {error.start + 1} of the line")
    except TooDeep as error:
        return BrokenRow(str(error))
    except ValueError as error:
        return BrokenRow(f"not JSON: {error}")


def _document(stream: IO[bytes], file: DataFile) -> _Rows:
    text = _whole(stream, file).decode("utf-8-sig")
    try:
        values = parse_list(text)
    except json.JSONDecodeError as error:
        yield error.lineno, BrokenRow(f"not JSON: {error}; a file with one object per line must be named .jsonl")
        return
    except ValueError as error:
        raise _unreadable(file, error) from error
    if not isinstance(values, list):
        yield 1, BrokenRow(f"a .json file must hold a list of rows, this is {json_type(values)}")
        return
    for number, value in enumerate(values, 1):
        yield number, value if is_shallow(value) else BrokenRow(str(TooDeep()))


def _table(stream: IO[bytes], file: DataFile) -> _Rows:
    """Rows of CSV under a header; the number is the line in which the row begins. All values are text."""
    # The csv module's own limit of 128 KiB a field is a setting of the whole process; long documents are normal here.
    csv.field_size_limit(MAX_LINE)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    lines = _bounded(lambda: text.readline(MAX_LINE + 1), file)
    try:
        yield from _records(csv.reader(lines, delimiter="\t" if file.kind == ".tsv" else ",", strict=True), file)
    finally:
        text.detach()  # the stream is closed by who opened it


def _records(reader: Any, file: DataFile) -> Iterator[tuple[int, Any]]:
    header = next(reader, None)
    if header is None:
        return
    if len(set(header)) != len(header) or not all(header):
        raise _unreadable(file, "the first line must name every column, each by a different name")
    begin = reader.line_num + 1
    for values in reader:
        number, begin = begin, reader.line_num + 1
        if not values:
            continue
        if len(values) != len(header):
            yield number, BrokenRow(f"the row has {len(values)} values, the header names {len(header)} columns")
        else:
            yield number, dict(zip(header, values, strict=True))


def _columns(stream: IO[bytes], file: DataFile, after: int) -> _Rows:
    import pyarrow as pa

    from ftcli.rows.columnar import Unreadable, records, rows_before

    try:
        source = pa.BufferReader(_whole(stream, file)) if file.compressed else pa.memory_map(str(file.path))
        with source:
            parquet = file.kind == ".parquet"
            first, groups = rows_before(source, after) if parquet else (0, None)
            for number, row in enumerate(records(source, parquet=parquet, longest=MAX_LINE, groups=groups), first + 1):
                yield number, BrokenRow(str(row)) if isinstance(row, Unreadable) else without_nulls(row)
    except (pa.ArrowException, ValueError) as error:
        raise _unreadable(file, error) from error


def without_nulls(value: JsonObject) -> JsonObject:
    """The row with nulls removed below its columns: columnar files fill every struct with the keys of all others."""
    return {key: _pruned(item) for key, item in value.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value


def json_type(value: Any) -> str:
    """JSON's name of a value's type, with its article."""
    names = {list: "a list", dict: "an object", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")
