"""A folder gives the rows of one split, or says that nobody can know which they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftcli.config.data import DatasetConfig
from ftcli.errors import FtcliError
from ftcli.rows.places import files_of


def folder_of(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).write_text('{"text": "a"}\n')
    return path


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (("chats.jsonl", "test.jsonl"), None),
        (("train.jsonl", "validation.jsonl"), None),
        (("train.jsonl", "more.jsonl"), "train"),
        (("train.jsonl",), "test"),
    ],
)
def test_what_nobody_can_know_is_refused(tmp_path: Path, names: tuple[str, ...], split: str | None) -> None:
    with pytest.raises(FtcliError) as raised:
        files_of(DatasetConfig(path=str(folder_of(tmp_path, *names)), split=split))
    assert raised.value.findings[0].code == "FT407"


@pytest.mark.parametrize(
    ("names", "split", "count"),
    [
        (("a.jsonl", "b.jsonl"), None, 2),
        (("train.jsonl", "more.jsonl"), None, 2),
        (("test.jsonl",), None, 1),
        (("train.jsonl", "test.jsonl"), "test", 1),
    ],
)
def test_what_is_clear_is_read(tmp_path: Path, names: tuple[str, ...], split: str | None, count: int) -> None:
    assert len(files_of(DatasetConfig(path=str(folder_of(tmp_path, *names)), split=split))) == count


def test_a_saved_data_set_of_another_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(json.dumps({"_split": "train", "_data_files": [{"filename": "d.arrow"}]}))
    assert len(files_of(DatasetConfig(path=str(tmp_path), split="train"))) == 1
    with pytest.raises(FtcliError, match="no split 'test'"):
        files_of(DatasetConfig(path=str(tmp_path), split="test"))
