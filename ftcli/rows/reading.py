"""All rows of one source of a recipe: its files in order, columns renamed, faults beside the rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ftcli.config.data import DatasetConfig, Part
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.rows.hub import hub_rows
from ftcli.rows.places import files_of, is_hub
from ftcli.rows.readers import BrokenRow, json_type, read_file
from ftcli.rows.row import BROKEN_HELP, NO_ROWS_HELP, Row, column_names, data_error
from ftcli.rows.stream import RawRow, RowStream


def iterate(source: DatasetConfig, *, offline: bool = False) -> Iterator[Row | Finding]:
    """Each row, or the finding (FT403, FT405) that says why it is none, up to ``max_rows`` of both together.

    Raises FtcliError (exit 4) when the source itself cannot be read: FT401, FT402, FT403, FT406, FT407.
    """
    yield from rows_of(source, islice(_values(source, offline=offline), source.max_rows))


def rows_of(source: DatasetConfig, values: Iterable[RawRow]) -> Iterator[Row | Finding]:
    """What :func:`iterate` makes of the values of a source's rows."""
    part = source.part
    for name, folder, number, value in values:
        found = _row(source, name, number, value, folder)
        if part is None or _is_in(found, part):
            yield found


def _is_in(found: Row | Finding, part: Part) -> bool:
    """True if a row belongs to a part of its source: by its content, wherever it stands. Faults are of the trained
    part, so that each is told once.
    """
    if not isinstance(found, Row):
        return not part.held_out
    text = json.dumps(found.fields, sort_keys=True, default=repr)
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (int.from_bytes(digest[:8], "big") < part.share * 2**64) == part.held_out


def no_rows(source: DatasetConfig) -> FtcliError:
    """FT404: there is a file, and no row in it, or none in the part of it that is read."""
    if source.part is not None:
        which = "held out" if source.part.held_out else "left to train on"
        message = f"data.held_out {source.part.share:g} leaves no row of {source.path} that is {which}"
        return data_error("FT404", message, Origin(source.path), "choose another share, or name rows in data.eval")
    return data_error("FT404", f"{source.path} holds no rows", Origin(source.path), NO_ROWS_HELP)


def _values(source: DatasetConfig, *, offline: bool) -> Iterator[RawRow]:
    """Name and folder of each file, and number and value of each of its rows; of a stream those of its window."""
    if source.window is not None:
        yield from RowStream(source, offline=offline).take(source.window.rows)
        return
    if is_hub(source):
        yield from ((source.path, None, number, value) for number, value in hub_rows(source, offline=offline))
        return
    for file in files_of(source):
        folder = str(file.path.parent.absolute())
        yield from ((file.name, folder, number, value) for number, value in read_file(file))


def _row(source: DatasetConfig, name: str, number: int, value: Any, folder: str | None) -> Row | Finding:
    if isinstance(value, BrokenRow):
        return Finding("FT403", value.reason, Origin(name, number), BROKEN_HELP)
    if not isinstance(value, dict):
        message = f"a row must be a JSON object, this is {json_type(value)}"
        return Finding("FT403", message, Origin(name, number), BROKEN_HELP)
    if source.remove_columns:
        value = {key: item for key, item in value.items() if key not in source.remove_columns}
    if not source.columns:
        return Row(name, number, value, folder)
    taken = set(source.columns.values())
    missing = [column for column in source.columns.values() if column not in value]
    if missing:
        message = f"column {missing[0]!r} (named by `columns`) is missing; this row has: {column_names(value)}"
        return Finding("FT405", message, Origin(name, number))
    renamed = {wanted: value[present] for wanted, present in source.columns.items()}
    return Row(name, number, {**{key: item for key, item in value.items() if key not in taken}, **renamed}, folder)
