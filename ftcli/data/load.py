"""Reads rows from JSON and JSON Lines files, each with the file and row that it came from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftcli.assets import asset
from ftcli.config import DatasetConfig
from ftcli.errors import ExitCode, Finding, FtcliError, Origin

BUNDLED = "bundled:"
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
MAX_NAMED = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``source`` as the recipe names it, ``number`` counted from 1 (the line, in JSON Lines)."""

    source: str
    number: int
    fields: dict[str, Any]

    @property
    def origin(self) -> Origin:
        """Where to look, as ``file:row``."""
        return Origin(self.source, self.number)


def resolve_path(name: str) -> Path:
    """The file that a recipe's ``path`` means; ``bundled:NAME`` is ``assets/data/NAME.jsonl`` or ``.jsonl.gz``."""
    if not name.startswith(BUNDLED):
        return Path(name).expanduser()
    stem = name.removeprefix(BUNDLED)
    plain = asset("data", f"{stem}.jsonl")
    return plain if plain.exists() else asset("data", f"{stem}.jsonl.gz")


def read_rows(dataset: DatasetConfig) -> list[Row]:
    """All rows of one source, columns renamed.

    Raises FtcliError (exit 4): FT401 no such file, FT402 a layout that is not read, FT403 broken rows
    (the first twenty are named), FT404 no rows, FT405 a missing column.
    """
    path = resolve_path(dataset.path)
    if not path.is_file():
        raise data_error("FT401", f"no data file at {path.absolute()}", Origin(dataset.path))
    if not path.name.endswith(SUFFIXES):
        raise data_error(
            "FT402",
            f"{path.name} is none of the layouts that ftcli reads",
            Origin(dataset.path),
            help=f"convert it to one of {', '.join(SUFFIXES)}",
        )
    findings: list[Finding] = []
    rows: list[Row] = []
    for number, value in _values(path, dataset, findings):
        if not isinstance(value, dict):
            _note(findings, dataset, number, f"a row must be a JSON object, this is {_kind(value)}")
            continue
        rows.append(Row(dataset.path, number, _renamed(value, dataset, number, findings)))
        if dataset.max_rows is not None and len(rows) >= dataset.max_rows:
            break
    raise_findings(findings)
    if not rows:
        raise data_error("FT404", f"{dataset.path} holds no rows", Origin(dataset.path))
    return rows


def data_error(code: str, message: str, origin: Origin, help: str | None = None) -> FtcliError:
    """A single data finding with exit status 4."""
    return FtcliError.single(code, message, exit_code=ExitCode.DATA, origin=origin, help=help)


def raise_findings(findings: list[Finding]) -> None:
    """Raises all findings of a stage together; the first twenty are named, the rest are counted."""
    if not findings:
        return
    shown = findings[:MAX_NAMED]
    if len(findings) > MAX_NAMED:
        more = Finding(findings[-1].code, f"and {len(findings) - MAX_NAMED} more rows like these")
        shown = [*shown, more]
    raise FtcliError(shown, ExitCode.DATA)


def _values(path: Path, dataset: DatasetConfig, findings: list[Finding]) -> Iterator[tuple[int, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if ".jsonl" in path.suffixes:
                yield from _lines(file, dataset, findings)
            else:
                yield from _document(file.read(), dataset, findings)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise data_error("FT403", f"{dataset.path} cannot be read: {error}", Origin(dataset.path)) from error


def _lines(file: Any, dataset: DatasetConfig, findings: list[Finding]) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            _note(findings, dataset, number, f"not JSON: {error}")


def _document(text: str, dataset: DatasetConfig, findings: list[Finding]) -> Iterator[tuple[int, Any]]:
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        _note(findings, dataset, line, f"not JSON: {error}; one object a line wants the ending .jsonl")
        return
    if not isinstance(values, list):
        _note(findings, dataset, 1, f"a .json file must hold a list of rows, this is {_kind(values)}")
        return
    yield from enumerate(values, 1)


def _note(findings: list[Finding], dataset: DatasetConfig, number: int, message: str) -> None:
    findings.append(Finding("FT403", message, Origin(dataset.path, number)))


def _renamed(value: dict[str, Any], dataset: DatasetConfig, number: int, findings: list[Finding]) -> dict[str, Any]:
    fields = dict(value)
    for wanted, present in dataset.columns.items():
        if present not in fields:
            names = ", ".join(sorted(value)) or "none"
            message = f"column {present!r} (data.columns maps it to {wanted!r}) is missing; this row has: {names}"
            findings.append(Finding("FT405", message, Origin(dataset.path, number)))
            continue
        fields[wanted] = fields.pop(present)
    return fields


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", int: "a number", float: "a number", bool: "a boolean"}
    return names.get(type(value), "null")
