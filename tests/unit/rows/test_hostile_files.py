"""Cells that Python cannot hold, flipped bits, JSON nested without end: read, or refused by row."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.config.data import DatasetConfig
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.rows.layouts import understand
from ftcli.rows.limits import MAX_LEVELS, TooDeep, parse
from ftcli.rows.reading import iterate
from ftcli.rows.row import Misfit, Row

#: Of the year 30000, in seconds.
FAR = 9 * 10**11


def columns(*more: tuple[str, pa.Array]) -> pa.Table:
    table = pa.table({"text": ["a", "b"]})
    for name, array in more:
        table = table.append_column(name, array)
    return table


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def read(path: Path) -> list[Row | Finding]:
    return list(iterate(DatasetConfig(path=str(path))))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("type_", "far", "shown"),
    [
        (pa.timestamp("s"), FAR, "30489-11-11 16:00:00"),
        (pa.timestamp("us", tz="UTC"), FAR * 10**6, "30489-11-11 16:00:00"),
        (pa.duration("s"), 10**14, "100000000000000"),
        (pa.date32(), 10**7, "29349-01-26"),
    ],
)
def test_dates_beyond_pythons_do_not_hold_up_rows_that_have_them(
    tmp_path: Path, kind: str, type_: pa.DataType, far: int, shown: str
) -> None:
    path = tmp_path / f"x.{kind}"
    numbers = pa.array([far, 1], pa.int32() if pa.types.is_date32(type_) else pa.int64())
    write(path, columns(("when", numbers.view(type_))))
    rows = read(path)
    assert [row.fields["text"] for row in rows if isinstance(row, Row)] == ["a", "b"]
    first, second = (row.fields["when"] for row in rows if isinstance(row, Row))
    assert first.startswith(shown)
    assert not isinstance(second, str)


def test_a_cell_that_nothing_can_show_is_a_bad_row_and_names_its_column(tmp_path: Path) -> None:
    inner = pa.array([FAR, 1], pa.int64()).view(pa.timestamp("s"))
    write(tmp_path / "x.parquet", columns(("meta", pa.StructArray.from_arrays([inner], ["when"]))))
    first, second = read(tmp_path / "x.parquet")
    assert isinstance(first, Finding)
    assert (first.code, str(first.origin)) == ("FT403", f"{tmp_path}/x.parquet:1")
    assert "column 'meta'" in first.message
    assert isinstance(second, Row)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"x.{kind}"
    table = columns(("text", pa.array(["c", "d"])))
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        write(path, table)
    with pytest.raises(FtcliError, match=r"FT403.*the same name") as caught:
        read(path)
    assert caught.value.exit_code == ExitCode.DATA


@pytest.mark.parametrize("stream", [False, True])
def test_flipped_bits_of_arrow_files_are_refused_or_read(tmp_path: Path, stream: bool) -> None:
    rows = [{"messages": [{"role": "user", "content": "q" * n}], "n": n, "tags": ["a"] * n} for n in range(5)]
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table)
    refused, codes, chance = 0, set(), random.Random(0)
    for _ in range(300):
        content = bytearray(out.getvalue())
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        (tmp_path / "x.arrow").write_bytes(content)
        try:
            read(tmp_path / "x.arrow")
        except FtcliError as error:
            codes.add((error.exit_code, error.findings[0].code))
            refused += 1
    assert 0 < refused < 300
    assert codes == {(ExitCode.DATA, "FT403")}


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("levels", [MAX_LEVELS, 300, 900, 5000])
def test_rows_nested_too_deep_are_bad_rows_like_others(tmp_path: Path, levels: int) -> None:
    text = "[" * levels + "]" * levels
    (tmp_path / "x.jsonl").write_text(f'{{"text": "a", "deep": {text}}}\n{{"text": "b"}}\n')
    first, second = read(tmp_path / "x.jsonl")
    assert isinstance(first, Finding)
    assert (first.code, first.origin) == ("FT403", Row(f"{tmp_path}/x.jsonl", 1, {}).origin)
    assert isinstance(second, Row)
    if levels < 900:
        (tmp_path / "x.json").write_text(f'[{{"text": "a", "deep": {text}}}, {{"text": "b"}}]')
        assert [type(item) for item in read(tmp_path / "x.json")] == [Finding, Row]


@pytest.mark.parametrize("levels", [300, 900, 5000])
def test_deep_json_in_the_texts_of_a_row_misfits(levels: int) -> None:
    text = "[" * levels + "]" * levels
    call = {"name": "f", "arguments": f'{{"a": {text}}}'}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    said = [{"from": "human", "value": "q"}, {"from": "function_call", "value": text}]
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for layout, fields in (
        ("messages", {"messages": chat}),
        ("messages", {"messages": text}),
        ("messages", {"messages": plain, "tools": text}),
        ("sharegpt", {"conversations": said}),
    ):
        with pytest.raises(Misfit, match="levels deep"):
            understand(Row("x", 1, fields), layout)


def test_a_value_of_as_many_levels_as_there_may_be_is_read() -> None:
    assert parse(json.dumps(nested(MAX_LEVELS))) == nested(MAX_LEVELS)
    with pytest.raises(TooDeep):
        parse(json.dumps(nested(MAX_LEVELS + 1)))
