"""Small files that hold very much, and folders that are no data, are refused before they cost memory or time."""

from __future__ import annotations

import gzip
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.config.data import DatasetConfig
from ftcli.data.prepare import CHUNK_ROWS, encode_all
from ftcli.errors import FtcliError
from ftcli.preflight.checks import data as data_checks
from ftcli.preflight.checks.context import NotMade
from ftcli.rows import columnar, places, readers
from ftcli.rows.reading import iterate
from ftcli.rows.row import Row, text_size


def read(path: Path) -> list[object]:
    return list(iterate(DatasetConfig(path=str(path))))


def codes(path: Path) -> tuple[str, str]:
    with pytest.raises(FtcliError) as caught:
        read(path)
    return caught.value.findings[0].code, caught.value.findings[0].message


@pytest.mark.parametrize("name", ["d.jsonl.gz", "d.csv.gz", "d.tsv.gz", "d.jsonl"])
def test_a_line_that_would_fill_the_memory_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE", 2**20)
    path = tmp_path / name
    content = b'{"text": "' + b"a" * 2**21 + b'"}\n'
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    code, message = codes(path)
    assert code == "FT403"
    assert "line of more than 1 MiB" in message


@pytest.mark.parametrize("name", ["d.json.gz", "d.parquet.gz"])
def test_a_compressed_document_that_would_fill_the_memory_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_UNPACKED", 2**20)
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"[" + b" " * 2**21 + b"]"))
    code, message = codes(path)
    assert code == "FT403"
    assert "unpacks to more than 1 MiB" in message


def repeated(count: int, value: str) -> pa.Array:
    """One value under any number of rows: a few bytes in both formats."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


def nulls(count: int) -> pa.Array:
    """They need no bytes."""
    return pa.Array.from_buffers(pa.null(), count, [None])


def lists(length: int, levels: int = 1) -> pa.Array:
    """Two lists of so many nulls, or of so many such lists."""
    array = nulls(2 * length**levels)
    for _ in range(levels):
        array = pa.FixedSizeListArray.from_arrays(array, length)
    return array


def written(path: Path, array: pa.Array) -> Path:
    table = pa.table({"text": array})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", data_page_size=2**31 - 1)
        return path
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return path


def test_a_piece_that_would_fill_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_BATCH", 512 << 20)  # threads that Arrow starts now take 70 MiB of addresses each
    assert len(read(written(tmp_path / "small.arrow", pa.array(["a", "b"])))) == 2
    bomb = written(tmp_path / "bomb.arrow", pa.array(["x" * 1_234_567]))
    length, more = struct.pack("<q", 1_234_567), struct.pack("<q", 5 << 28)  # than Arrow's allocator has reserved
    before, found, after = bomb.read_bytes().rpartition(length)
    assert found, "the length that stands before what was compressed"
    bomb.write_bytes(before + more + after)
    code, message = codes(bomb)
    assert (code, "unpacks to more than" in message) == ("FT403", True)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_texts_of_a_dictionary_are_counted_as_often_as_rows_have_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "MAX_TEXT", 2**20)
    bomb = written(tmp_path / f"x.{kind}", repeated(10_000, "x" * 2**17))
    assert bomb.stat().st_size < 2000
    code, message = codes(bomb)
    assert (code, "more than 1,000 times its size" in message) == ("FT403", True)


@pytest.mark.parametrize("array", [lists(10**9), lists(10**4, 2), repeated(2, "x" * (17 << 20))])
def test_a_row_that_is_longer_than_any_line_is_refused_before_it_is_made(tmp_path: Path, array: pa.Array) -> None:
    code, message = codes(written(tmp_path / "x.arrow", array))
    assert (code, "a row of more than 16.00 MiB" in message) == ("FT403", True)


def test_rows_without_end_are_refused_at_once(tmp_path: Path) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([10**9], pa.int64()), pa.array(["hello"]))
    for array in (nulls(10**9), runs):
        code, message = codes(written(tmp_path / "x.arrow", array))
        assert (code, "it claims to have 1,000,000,000 rows" in message) == ("FT403", True)


def test_more_rows_than_a_file_says_in_its_metadata_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columnar, "MAX_ROWS", 1000)
    monkeypatch.setattr(columnar, "MAX_ROWS_A_BYTE", 1)
    path = written(tmp_path / "x.parquet", repeated(5000, "a"))
    assert path.stat().st_size < 1000
    assert codes(path)[0] == "FT403"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_long_rows_are_read_a_few_at_a_time(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_OBJECTS", 24 << 20)
    texts = [f"{n}" + "x" * (8 << 20) for n in range(12)]
    rows = read(written(tmp_path / f"x.{kind}", pa.array(texts)))
    assert [row.fields["text"][:3] for row in rows if isinstance(row, Row)] == [text[:3] for text in texts]


def test_check_does_not_unpack_a_document_to_see_its_first_rows(
    context: Callable, load: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli.facts.model import read_facts

    monkeypatch.setattr(data_checks, "MAX_DOCUMENT", 4 << 20)
    path = tmp_path / "d.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (data_checks.MAX_DOCUMENT + 1) + b"]"))
    assert path.stat().st_size < 2**16
    ready = context(f"data: {{train: [{path}]}}\n")
    facts = read_facts(ready.recipe.model, offline=True, origins=ready.origins)
    (found,) = data_checks.check(ready, facts, offline=True)
    assert isinstance(found, NotMade)
    assert "over 4 MiB unpacked" in found.reason


def test_check_looks_at_less_rows_where_they_are_long(
    context: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_checks, "MAX_CHARACTERS", 1000)
    items = (Row("d", number, {"text": "x" * 400}) for number in range(64))
    assert len(list(data_checks._first(items))) == 3


def test_a_folder_of_everything_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_ENTRIES", 20)
    for number in range(30):
        (tmp_path / f"{number}.txt").touch()
    code, message = codes(tmp_path)
    assert code == "FT407"
    assert "more than 20 files" in message


def test_hidden_folders_are_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_ENTRIES", 20)
    (tmp_path / ".git").mkdir()
    for number in range(30):
        (tmp_path / ".git" / f"{number}.jsonl").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl").write_text('{"text": "b"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert [row.fields["text"] for row in read(tmp_path) if isinstance(row, Row)] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("d.jsonl", '{"text": "a", "text": "b"}\n', "not JSON: the key 'text' appears twice"),
        ("d.jsonl", '{"messages": [{"role": "user", "role": "system"}]}\n', "the key 'role' appears twice"),
        ("d.json", '[{"text": "a", "text": "b"}]', "the key 'text' appears twice"),
    ],
)
def test_a_key_that_a_row_has_twice_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    if name.endswith(".json"):
        code, message = codes(path)
        assert (code, said in message) == ("FT403", True)
        return
    (found,) = read(path)
    assert said in found.message  # type: ignore[attr-defined]


class Counting:
    """Notes how many rows each chunk has."""

    def batch(self, rows: list[Row]) -> int:  # type: ignore[override]
        return len(rows)


def test_chunks_are_smaller_where_rows_are_long() -> None:
    long = [Row("d", n, {"text": "x" * 3 * 2**19}) for n in range(5)]
    assert list(encode_all(Counting(), long, 1)) == [3, 2]  # type: ignore[arg-type]
    short = [Row("d", n, {"text": "x"}) for n in range(CHUNK_ROWS + 1)]
    assert list(encode_all(Counting(), short, 1)) == [CHUNK_ROWS, 1]  # type: ignore[arg-type]


def test_the_size_of_a_row_counts_what_lies_deep_in_it() -> None:
    deep: object = "x" * 100
    for _ in range(5000):
        deep = [deep]
    assert text_size({"a": deep, "b": [1, 2], "c": {"d": "yy"}}) == 100 + 16 + 2


def test_no_more_processes_than_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    from ftcli.assets import asset
    from ftcli.config.data import DataConfig
    from ftcli.data.prepare import encode_all, prepare
    from ftcli.facts.device import usable_cores
    from ftcli.reporting import SilentReporter

    class Told(SilentReporter):
        lines: list[str]

        def info(self, message: str) -> None:
            self.lines.append(message)

    asked = []

    def here(encoder: Any, rows: Any, processes: int, *rest: Any) -> Any:
        asked.append(processes)
        return encode_all(encoder, rows, 1, *rest)

    monkeypatch.setattr("ftcli.data.prepare.encode_all", here)
    told = Told()
    told.lines = []
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n')
    data = DataConfig.model_validate({"train": [str(path)], "num_proc": 10**9})
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    assert len(prepare(data.train, data, tokenizer, (1,), reporter=told).sequences) == 1
    assert asked == [usable_cores()]
    assert told.lines == [f"data.num_proc: {usable_cores()} processes, one for each processor that there is"]
