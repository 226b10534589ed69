"""Rows of a stream: each once a pass, shards in an order of the pass, and from any place on."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.config.data import DatasetConfig, StreamPlace, Window
from ftcli.errors import FtcliError
from ftcli.rows.stream import RowStream

ROWS = [{"text": f"row {number}"} for number in range(23)]


def stream_of(path: Path | str, place: StreamPlace | None = None, **window: Any) -> RowStream:
    found = Window(7, 100, place=place or StreamPlace(), **window)
    return RowStream(DatasetConfig(path=str(path)).with_window(found), offline=True)


def texts(stream: RowStream, count: int) -> list[str]:
    return [value["text"] for *_, value in stream.take(count)]


def write_csv(path: Path) -> None:
    with path.open("w") as stream:
        writer = csv.DictWriter(stream, ["text"])
        writer.writeheader()
        writer.writerows(ROWS)


KINDS: dict[str, Callable[[Path], object]] = {
    "x.jsonl": lambda path: path.write_text("\n" + "".join(json.dumps(row) + "\n\n" for row in ROWS)),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in ROWS).encode())),
    "x.json": lambda path: path.write_text(json.dumps(ROWS)),
    "x.csv": write_csv,
    "x.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=5),
}


@pytest.mark.parametrize("name", KINDS)
def test_it_goes_on_behind_any_row(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name)
    whole = [row["text"] for row in ROWS]
    for count in (1, 5, 10, 22, 23):
        first = stream_of(tmp_path / name, ends=False)
        assert texts(first, count) == whole[:count]
        assert texts(stream_of(tmp_path / name, first.place, ends=False), 30) == (whole[count:] + 2 * whole)[:30]


def shards(folder: Path, names: str) -> Path:
    for name in names:
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    return folder


def test_each_pass_has_an_order_of_its_own_in_which_a_new_shard_moves_no_other(tmp_path: Path) -> None:
    stream = stream_of(shards(tmp_path, "abcdefgh"))
    passes = [texts(stream, 100) for _ in range(3)]
    assert all(sorted(one) == list("abcdefgh") for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert passes[0] == texts(stream_of(tmp_path), 8)
    with_more = texts(stream_of(shards(tmp_path, "xyz")), 100)
    assert [text for text in with_more if text not in "xyz"] == passes[0]


def test_a_shard_that_was_read_is_held_to_its_content_and_the_next_ones_are_not(tmp_path: Path) -> None:
    stream = stream_of(shards(tmp_path, "abcd"))
    first, second, *rest = texts(stream, 4)
    stream = stream_of(tmp_path)
    texts(stream, 2)
    shards(tmp_path, "e")
    (tmp_path / f"{rest[0]}.jsonl").unlink()
    left = texts(stream_of(tmp_path, stream.place), 100)
    assert sorted([*left, first, second, rest[0]]) == list("abcde")
    (tmp_path / f"{first}.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(FtcliError, match=rf"FT731: .*{first}.jsonl has changed"):
        stream_of(tmp_path, stream.place)


def test_a_source_without_rows_is_an_error_and_no_endless_search(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(FtcliError, match="FT404"):
        next(stream_of(tmp_path).take(1))


def test_datasets_of_the_hub_are_streamed_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[bool] = []

    def load(*_: Any, streaming: bool, **__: Any) -> Any:
        asked.append(streaming)
        return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

    monkeypatch.setattr("ftcli.rows.hub._cached", lambda source: "folder")
    monkeypatch.setattr(datasets, "load_dataset", load)
    stream = stream_of("hub:org/name", ends=False)
    assert texts(stream, 9) == [row["text"] for row in ROWS[:9]]
    again = stream_of("hub:org/name", stream.place, ends=False)
    assert [value["text"] for *_, value in islice(again.take(20), 20)] == [
        row["text"] for row in (ROWS[9:] + ROWS)[:20]
    ]
    assert set(asked) == {True}
