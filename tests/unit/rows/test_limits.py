"""Small files that hold very much, and folders that are no data, are refused before they cost memory or time."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.config import DatasetConfig
from ftcli.data.parallel import CHUNK_ROWS, encode_all
from ftcli.errors import FtcliError
from ftcli.preflight.checks import data as data_checks
from ftcli.rows import places, readers
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


def test_check_does_not_unpack_a_document_to_see_its_first_rows(
    context: Callable, load: Callable, tmp_path: Path
) -> None:
    from ftcli.facts.model import read_facts

    path = tmp_path / "d.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (data_checks.MAX_DOCUMENT + 1) + b"]"))
    assert path.stat().st_size < 2**20
    ready = context(f"data: {{train: [{path}]}}\n")
    report = data_checks.check(ready, read_facts(ready.recipe.model, offline=True, origins=ready.origins), offline=True)
    assert report.findings == ()
    assert "over 64 MiB unpacked" in report.not_made[0].reason


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
        ("d.jsonl", '{"text": "a", "text": "b"}\n', "not JSON: the key 'text' is there twice"),
        ("d.jsonl", '{"messages": [{"role": "user", "role": "system"}]}\n', "the key 'role' is there twice"),
        ("d.json", '[{"text": "a", "text": "b"}]', "the key 'text' is there twice"),
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


def test_no_more_processes_than_there_are_cores(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from ftcli.assets import asset
    from ftcli.config import DataConfig
    from ftcli.data.parallel import cores
    from ftcli.data.prepare import prepare
    from ftcli.reporting import SilentReporter

    class Told(SilentReporter):
        lines: list[str]

        def info(self, message: str) -> None:
            self.lines.append(message)

    told = Told()
    told.lines = []
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "a"}\n')
    data = DataConfig.model_validate({"train": [str(path)], "num_proc": 10**9})
    tokenizer = AutoTokenizer.from_pretrained(str(asset("tokenizers", "bytes")))
    assert len(prepare(data.train, data, tokenizer, (1,), reporter=told).sequences) == 1
    assert told.lines == [f"data.num_proc: {cores()} processes, one for each processor that there is"]
