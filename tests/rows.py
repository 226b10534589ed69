"""Rows of data as tests want them: all at once."""

from __future__ import annotations

from ftcli.config.data import DatasetConfig
from ftcli.errors import Finding
from ftcli.rows.reading import iterate, no_rows
from ftcli.rows.row import Row, raise_findings


def read_rows(source: DatasetConfig) -> list[Row]:
    """All rows of a source. Raises FtcliError (exit 4) where it cannot be read, and for all broken rows together."""
    items = list(iterate(source))
    raise_findings([item for item in items if isinstance(item, Finding)])
    if not items:
        raise no_rows(source)
    return [item for item in items if isinstance(item, Row)]
