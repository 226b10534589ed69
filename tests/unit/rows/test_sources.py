"""Every kind of file gives the same rows; folders keep splits apart; the Hub is asked through one function."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.config.data import DatasetConfig
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.rows.hub import hub_commit, hub_rows
from ftcli.rows.reading import iterate
from ftcli.rows.row import Row

ROWS = [{"prompt": "q1", "completion": "größe 漢"}, {"prompt": 'q,2\n"x"', "completion": "a2"}]


def content(kind: str, rows: list[dict[str, Any]]) -> bytes:
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if kind == "json":
        return json.dumps(rows).encode()
    if kind in ("csv", "tsv"):
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0].keys(), delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    table = pa.Table.from_pylist(rows)
    sink = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, sink, row_group_size=1)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    return sink.getvalue()


def read(path: Path | str, **options: Any) -> list[Row]:
    items = list(iterate(DatasetConfig.model_validate({"path": str(path), **options})))
    assert all(isinstance(item, Row) for item in items), items
    return [item for item in items if isinstance(item, Row)]


def code_of(path: Path | str, **options: Any) -> str:
    with pytest.raises(FtcliError) as caught:
        list(iterate(DatasetConfig.model_validate({"path": str(path), **options})))
    assert caught.value.exit_code == ExitCode.DATA
    return caught.value.findings[0].code


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet", "arrow"])
def test_every_kind_gives_the_same_rows(tmp_path: Path, kind: str, compressed: bool) -> None:
    data = content(kind, ROWS)
    path = tmp_path / f"d.{kind}{'.gz' if compressed else ''}"
    path.write_bytes(gzip.compress(data) if compressed else data)
    rows = read(path)
    assert [row.fields for row in rows] == ROWS
    assert {row.source for row in rows} == {str(path)}
    expected = [2, 3] if kind in ("csv", "tsv") else [1, 2]  # CSV counts lines, as editors do
    assert [row.number for row in rows] == expected


def test_an_arrow_file_and_a_saved_dataset_are_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert [row.fields for row in read(tmp_path / "d.arrow")] == ROWS
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert [row.fields for row in read(tmp_path / "saved")] == ROWS
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    )
    both.save_to_disk(tmp_path / "both")
    assert len(read(tmp_path / "both", split="test")) == 1
    assert code_of(tmp_path / "both") == "FT407"


def test_nulls_that_columnar_files_add_are_removed_below_the_columns(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": "{}"}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
    ]
    (tmp_path / "d.parquet").write_bytes(content("parquet", [{"messages": chat, "note": None}]))
    fields = read(tmp_path / "d.parquet")[0].fields
    assert fields["messages"][0] == {"role": "user", "content": "q"}
    assert fields["note"] is None


def test_a_row_of_csv_with_a_comma_too_many_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('text,note\n"two\nlines",x\na,b,c\nd,e\n')
    items = list(iterate(DatasetConfig(path=str(tmp_path / "d.csv"))))
    assert [item.number for item in items if isinstance(item, Row)] == [2, 5]
    (finding,) = (item for item in items if isinstance(item, Finding))
    assert str(finding.origin) == f"{tmp_path}/d.csv:4"
    assert "3 values, the header names 2" in finding.message


def test_long_fields_of_csv_are_read(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("text\n" + "x" * 200_000 + "\n")
    assert len(read(tmp_path / "d.csv")[0].fields["text"]) == 200_000


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.parquet", b"PAR1 no"),
        ("a.arrow", b"ARROW1 no"),
        ("a.arrow", b"no"),
        ("a.csv", b"a,a\n1,2\n"),
        ("a.csv", b"a,b\n\xff\xfe,1\n"),
        ("a.csv.gz", gzip.compress(b"a,b\n1,2\n", mtime=0)[:-12]),
        ("a.jsonl", "{}".encode("utf-16")),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 1000, mtime=0)[:20]),
    ],
)
def test_damaged_files_are_an_error_of_the_data(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert code_of(tmp_path / name) == "FT403"


def test_one_broken_byte_names_its_row_and_spares_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n')
    items = list(iterate(DatasetConfig(path=str(tmp_path / "a.jsonl"))))
    assert [item.fields["text"] for item in items if isinstance(item, Row)] == ["a", "b"]
    (finding,) = (item for item in items if isinstance(item, Finding))
    assert (finding.code, str(finding.origin)) == ("FT403", f"{tmp_path}/a.jsonl:2")


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "2"}\n')
    (tmp_path / "a.csv").write_text("text\n1\n")
    (tmp_path / "sub" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "3"}\n'))
    (tmp_path / ".hidden.jsonl").write_text('{"text": "no"}\n')
    (tmp_path / "README.md").write_text("no data")
    rows = read(tmp_path)
    assert [row.fields["text"] for row in rows] == ["1", "2", "3"]
    assert [str(row.origin) for row in rows] == [
        f"{tmp_path}/{n}" for n in ("a.csv:2", "b.jsonl:1", "sub/c.jsonl.gz:1")
    ]
    assert len(read(tmp_path, max_rows=2)) == 2


def test_test_rows_in_the_same_folder_never_slip_into_training(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert code_of(tmp_path) == "FT407"
    assert [row.fields["text"] for row in read(tmp_path, split="train")] == ["train-00000.jsonl", "train-00001.jsonl"]
    assert code_of(tmp_path, split="validation") == "FT407"
    (tmp_path / "empty").mkdir()
    assert code_of(tmp_path / "empty") == "FT407"


def test_columns_can_be_swapped(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": "1", "b": "2", "c": "3"}\n')
    assert read(tmp_path / "d.jsonl", columns={"a": "b", "b": "a"})[0].fields == {"a": "2", "b": "1", "c": "3"}


def _loads_by(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.rows.hub._reachable", lambda source: True)
    monkeypatch.setattr("datasets.load_dataset", load)


def test_hub_options_reach_datasets_and_rows_are_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(path: str, **options: Any) -> list[dict[str, Any]]:
        asked.update(options, path=path)
        return [{"text": "a"}, {"text": "b"}]

    source = DatasetConfig(path="hub:org/data", name="en", split="test", revision="v1", streaming=True, max_rows=2)
    _loads_by(load, monkeypatch)
    assert list(hub_rows(source, offline=False)) == [(1, {"text": "a"}), (2, {"text": "b"})]
    wanted = {"path": "org/data", "name": "en", "split": "test", "revision": "v1", "streaming": True}
    assert {key: asked[key] for key in wanted} == wanted


def test_what_the_hub_refuses_is_one_coded_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> Any:
        raise ValueError("Unknown split \"tset\". Should be one of ['train'].")

    _loads_by(load, monkeypatch)
    with pytest.raises(FtcliError, match=r"FT406.*Unknown split"):
        list(hub_rows(DatasetConfig(path="hub:org/data", split="tset"), offline=False))


def test_without_a_network_and_a_cache_the_error_says_so_at_once() -> None:
    assert code_of("no-such-org/name") == "FT401"
    with pytest.raises(FtcliError, match=r"FT406.*told to use no network"):
        list(iterate(DatasetConfig(path="hub:no-such-org/no-such-name"), offline=True))
    assert hub_commit(DatasetConfig(path="hub:no-such-org/no-such-name"), offline=True) is None
    commit = "0123456789abcdef" * 2 + "01234567"
    assert hub_commit(DatasetConfig(path="hub:a/b", revision=commit), offline=True) == commit


def test_without_a_network_the_cached_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "datasets--org--data" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    (cache / "datasets--org--data" / "refs").mkdir()
    (cache / "datasets--org--data" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    source = DatasetConfig(path="hub:org/data")
    assert [item.fields for item in iterate(source, offline=True) if isinstance(item, Row)] == [
        {"text": "x"},
        {"text": "y"},
    ]
    assert hub_commit(source, offline=True) == "a" * 40
    with pytest.raises(FtcliError, match="FT406"):
        list(iterate(DatasetConfig(path="hub:org/data", split="test"), offline=True))
