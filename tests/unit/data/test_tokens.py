"""Rows in files: what is written is what is read, and values belong to the digest only where there are any."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcli.data.tokens import TokenizedRow, TokenStore, TokenTable, TokenWriter, encoded_of
from ftcli.labels import IGNORE_INDEX
from ftcli.rows.row import Row


def rows(*values: float) -> list[TokenizedRow]:
    return [
        TokenizedRow(Row("a.jsonl", n, {}), [n, 7, 8], [IGNORE_INDEX, 7, 8], value) for n, value in enumerate(values, 1)
    ]


def stored(folder: Path, *batches: list[TokenizedRow]) -> TokenTable:
    folder.mkdir()
    writer = TokenWriter(folder)
    for batch in batches:
        writer.append(encoded_of(batch))
    writer.finish({})
    return TokenTable([TokenStore(folder)])


def test_rows_come_back_with_their_values(tmp_path: Path) -> None:
    first, second = rows(1.0, -1.0), rows(0.0, 2.5)
    table = stored(tmp_path / "a", first, second)
    assert list(table) == [*first, *second]
    assert table.values.tolist() == [1.0, -1.0, 0.0, 2.5]


def test_a_value_is_part_of_the_digest(tmp_path: Path) -> None:
    found = {stored(tmp_path / str(n), rows(*values)).digest() for n, values in enumerate([(1, 1), (1, -1), (0, 0)])}
    assert len(found) == 3


def test_a_digest_of_rows_without_values_is_that_of_runs_before_rows_had_any(tmp_path: Path) -> None:
    assert stored(tmp_path / "a", rows(0.0, 0.0)).digest() == (
        "49463a8ee4b49f7e87be8ec2017ccad2f96e40267c5f85f1261676e2849b17da"
    )


def test_a_changed_value_is_found(tmp_path: Path) -> None:
    stored(tmp_path / "a", rows(1.0, 1.0))
    path = tmp_path / "a" / "values.bin"
    path.write_bytes(bytes(16))
    with pytest.raises(ValueError, match="not what was written"):
        TokenStore(tmp_path / "a")
