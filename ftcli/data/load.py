"""All rows of a source at once, for what needs them all: prompts of tasks and of GRPO."""

from __future__ import annotations

from ftcli.config import DatasetConfig
from ftcli.errors import Finding, Origin
from ftcli.rows.places import resolve_path
from ftcli.rows.reading import iterate
from ftcli.rows.row import NO_ROWS_HELP, Row, data_error, raise_findings

__all__ = ["Row", "data_error", "raise_findings", "read_rows", "resolve_path"]


def read_rows(dataset: DatasetConfig, *, offline: bool = False) -> list[Row]:
    """All rows of one source, columns renamed.

    Raises FtcliError (exit 4): FT401, FT402, FT406, FT407 when the source cannot be read, FT403 and FT405 for broken
    rows (all in one go), FT404 without rows.
    """
    rows: list[Row] = []
    findings: list[Finding] = []
    for item in iterate(dataset, offline=offline):
        if isinstance(item, Row):
            rows.append(item)
        else:
            findings.append(item)
    raise_findings(findings)
    if not rows:
        raise no_rows(dataset)
    return rows


def no_rows(dataset: DatasetConfig) -> Exception:
    """FT404."""
    return data_error("FT404", f"{dataset.path} holds no rows", Origin(dataset.path), NO_ROWS_HELP)
