"""All rows of one source of a recipe: its files in order, columns renamed, faults beside the rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ftcli.config.data import DatasetConfig
from ftcli.errors import Finding, FtcliError, Origin
from ftcli.rows.hub import hub_rows
from ftcli.rows.places import files_of, is_hub
from ftcli.rows.readers import BrokenRow, json_type, read_file
from ftcli.rows.row import BROKEN_HELP, NO_ROWS_HELP, Row, column_names, data_error


def iterate(source: DatasetConfig, *, offline: bool = False) -> Iterator[Row | Finding]:
    """Each row, or the finding (FT403, FT405) that says why it is none, up to ``max_rows`` of both together.

    Raises FtcliError (exit 4) when the source itself cannot be read: FT401, FT402, FT403, FT406, FT407.
    """
    for name, number, value in islice(_values(source, offline=offline), source.max_rows):
        yield _row(source, name, number, value)


def no_rows(source: DatasetConfig) -> FtcliError:
    """FT404: there is a file, and no row in it."""
    return data_error("FT404", f"{source.path} holds no rows", Origin(source.path), NO_ROWS_HELP)


def _values(source: DatasetConfig, *, offline: bool) -> Iterator[tuple[str, int, Any]]:
    if is_hub(source):
        yield from ((source.path, number, value) for number, value in hub_rows(source, offline=offline))
        return
    for file in files_of(source):
        yield from ((file.name, number, value) for number, value in read_file(file))


def _row(source: DatasetConfig, name: str, number: int, value: Any) -> Row | Finding:
    if isinstance(value, BrokenRow):
        return Finding("FT403", value.reason, Origin(name, number), BROKEN_HELP)
    if not isinstance(value, dict):
        message = f"a row must be a JSON object, this is {json_type(value)}"
        return Finding("FT403", message, Origin(name, number), BROKEN_HELP)
    if source.remove_columns:
        value = {key: item for key, item in value.items() if key not in source.remove_columns}
    if not source.columns:
        return Row(name, number, value)
    taken = set(source.columns.values())
    missing = [column for column in source.columns.values() if column not in value]
    if missing:
        message = f"column {missing[0]!r} (named by `columns`) is missing; this row has: {column_names(value)}"
        return Finding("FT405", message, Origin(name, number))
    renamed = {wanted: value[present] for wanted, present in source.columns.items()}
    return Row(name, number, {**{key: item for key, item in value.items() if key not in taken}, **renamed})
