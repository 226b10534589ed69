"""Rows are read with the place they came from; whatever is wrong is named, all in one go."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.errors import ExitCode, FtcliError
from tests.rows import read_rows


def write(path: Path, *lines: str) -> DatasetConfig:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DatasetConfig(path=str(path))


def error_of(dataset: DatasetConfig) -> FtcliError:
    with pytest.raises(FtcliError) as caught:
        read_rows(dataset)
    assert caught.value.exit_code == ExitCode.DATA
    return caught.value


def test_json_lines_keep_line_numbers_across_blank_lines(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.jsonl", '{"text": "x"}', "", '{"text": "y"}'))
    assert [(row.number, row.fields["text"]) for row in rows] == [(1, "x"), (3, "y")]


def test_json_list_and_gzip(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x"}, {"text": "ü"}]), encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress('{"text": "ü"}\n'.encode()))
    assert [row.fields["text"] for row in read_rows(DatasetConfig(path=str(tmp_path / "a.json")))] == ["x", "ü"]
    assert read_rows(DatasetConfig(path=str(tmp_path / "a.jsonl.gz")))[0].fields["text"] == "ü"


def test_every_broken_row_is_named_at_once(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "a.jsonl", '{"text": "x"}', "{", '["a"]', '{"text": "y"}', "nope"))
    assert [str(f.origin) for f in error.findings] == [f"{tmp_path}/a.jsonl:{n}" for n in (2, 3, 5)]
    assert "a list" in error.findings[1].message


def test_rows_beyond_a_thousand_are_counted_by_code(tmp_path: Path) -> None:
    error = error_of(write(tmp_path / "a.jsonl", *["{"] * 1002))
    assert len(error.findings) == 1001
    assert "2 more rows like these (2 of FT403)" in error.findings[-1].message


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("missing.jsonl", None, "FT401"),
        ("table.xlsx", b"x", "FT402"),
        ("binary.jsonl", b"\xff\xfe\x00", "FT403"),
        ("broken.jsonl.gz", b"not gzip", "FT403"),
        ("object.json", b"{}", "FT403"),
        ("empty.jsonl", b"", "FT404"),
        ("empty.json", b"[]", "FT404"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes | None, code: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert error_of(DatasetConfig(path=str(tmp_path / name))).findings[0].code == code


def test_columns_are_renamed_and_a_missing_one_lists_those_present(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "reply": "r"}\n{"question": "q"}\n', encoding="utf-8")
    columns = {"prompt": "question", "completion": "reply"}
    rows = read_rows(DatasetConfig(path=str(path), columns=columns, max_rows=1))
    assert rows[0].fields == {"prompt": "q", "completion": "r"}
    error = error_of(DatasetConfig(path=str(path), columns=columns))
    assert error.findings[0].code == "FT405"
    assert "question" in error.findings[0].message
    assert str(error.findings[0].origin).endswith("a.jsonl:2")
