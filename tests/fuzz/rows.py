"""Rows of every layout with something wrong in them, and files of rows that are cut, flipped or none."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import reject
from hypothesis import strategies as st

from tests.fuzz import values

_CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "here", "deep": {"a": [1, 2]}}}}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}},
}  # fmt: skip
_CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

#: No column can hold this one: one content is a list, the other is text.
_IN_PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, _CHAT[1]]}

#: Rows as they should be, one or more of each layout.
GOOD: tuple[dict[str, Any], ...] = (
    {"messages": _CHAT},
    {"messages": [{"role": "system", "content": "s"}, *_CHAT, *_CHAT], "id": 3},
    {"messages": [*_CHAT[:1], {"role": "assistant", "content": "", "tool_calls": [_CALL]}], "tools": [_TOOL]},
    {"messages": [*_CHAT[:1], {"role": "assistant", "content": "a", "reasoning_content": "because"}]},
    {"messages": [*_CHAT[:1], {"role": "assistant", "content": "<think>\nbecause\n</think>\na", "weight": 1}]},
    _IN_PARTS,
    {"messages": json.dumps(_CHAT), "tools": json.dumps([_TOOL])},
    {"prompt": "q", "completion": "a"},
    {"prompt": _CHAT[:1], "completion": _CHAT[1:]},
    {"prompt": "q", "answer": "a"},
    {"instruction": "i", "input": "x", "output": "a"},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"text": "just text"},
    {"input_ids": [2, 5, 6, 4], "labels": [-100, 5, 6, 4]},
)

JUDGED = [
    {"prompt": _CHAT[:1], "chosen": _CHAT[1:], "rejected": [{"role": "assistant", "content": "b"}]},
    {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 1.5},
    {"prompt": _CHAT[:1], "completion": _CHAT[1:], "label": True},
    {"prompt": "q", "completion": "a", "label": 0},
    {"completion": _CHAT, "label": "good"},
    {"messages": _CHAT, "label": False},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "kto_tag": True},
    {"instruction": "i", "output": "o", "label": -1},
]  # fmt: skip
_KEYS = sorted(
    {key for row in GOOD for key in row} | {"role", "content", "name", "arguments", "function", "type", "text"}
)
_odd = (
    values.json_values
    | st.sampled_from([60, 200, 900]).map(values.deep)  # made anew each time: what is drawn is changed
    | st.sampled_from(["[" * 3000, "[" * 800 + "]" * 800, "\ud800", "a\udfff", "x" * 20_000])
)


def rows() -> st.SearchStrategy[dict[str, Any]]:
    """Rows with up to three values changed, added or taken away, at any depth."""
    return _changed(GOOD)


def judged() -> st.SearchStrategy[dict[str, Any]]:
    """The same of pairs and of answers with a label."""
    return _changed(JUDGED)


@st.composite
def _changed(draw: st.DrawFn, good: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: Any = json.loads(json.dumps(draw(st.sampled_from(good))))
    for _ in range(draw(st.integers(0, 3))):
        place: Any = row
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from([*keys, *_KEYS[:1]]) if keys else st.sampled_from(_KEYS))
            inner = place[key] if key in keys else None
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                place = inner
                continue
            break
        what = draw(st.sampled_from(["set", "set", "set", "remove", "add"]))
        if what == "remove" and key in keys:
            del place[key]
        elif isinstance(place, dict):
            place[draw(st.sampled_from(_KEYS) | values.text) if what == "add" else key] = draw(_odd)
        elif key in keys:
            place[key] = draw(_odd)
    return dict(row)


#: Columns of time and number types, from integers that few of them can take.
_TYPES = [
    pa.timestamp("s"), pa.timestamp("ms", tz="UTC"), pa.timestamp("us", tz="Nowhere/Land"), pa.timestamp("ns"), pa.date32(),
    pa.date64(), pa.duration("s"), pa.duration("ns"), pa.time32("s"), pa.time64("ns"), pa.float16(), pa.uint64(),
]  # fmt: skip


def _column(kind: pa.DataType, numbers: Sequence[int]) -> pa.Array:
    width = pa.types.is_date32(kind) or pa.types.is_time32(kind)
    if pa.types.is_float16(kind):
        return pa.array([float(n % 1000) for n in numbers], pa.float16())
    plain = pa.array([n % 2**31 if width else n % 2**63 for n in numbers], pa.int32() if width else pa.int64())
    return plain.view(kind)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table of good rows of one layout beside columns that nothing reads."""
    row = draw(st.sampled_from([row for row in GOOD if row is not _IN_PARTS]))
    count = draw(st.integers(1, 3))
    table = pa.Table.from_pylist([row] * count)
    for number in range(draw(st.integers(0, 2))):
        kind = draw(st.sampled_from(_TYPES))
        ints = st.sampled_from([abs(n) for n in values.NUMBERS])
        column = _column(kind, draw(st.lists(ints, min_size=count, max_size=count)))
        table = table.append_column(draw(st.sampled_from([f"c{number}", "text", "answer", ""])), column)
    return table


def parquet(table: pa.Table) -> bytes:
    """The table as a Parquet file."""
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


def arrow(table: pa.Table, *, stream: bool) -> bytes:
    """The table as an Arrow file or stream."""
    out = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def lines(items: Sequence[dict[str, Any]]) -> bytes:
    """The rows as JSON Lines."""
    return "\n".join(json.dumps(item) for item in items).encode()


def _csv(items: Sequence[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    names = list(dict.fromkeys(key for item in items for key in item))
    writer = csv.DictWriter(out, names)
    writer.writeheader()
    for item in items:
        writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in item.items()})
    return out.getvalue().encode("utf-8", "surrogatepass")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with bits flipped, bytes zeroed, cut off, or replaced by rubbish; or as it is."""
    what = draw(st.sampled_from(["whole", "flip", "flip", "flip", "zero", "cut", "rubbish", "grown"]))
    array = bytearray(content)
    if what == "flip" and array:
        for _ in range(draw(st.integers(1, 4))):
            array[draw(st.integers(0, len(array) - 1))] ^= 1 << draw(st.integers(0, 7))
    elif what == "zero" and array:
        start = draw(st.integers(0, len(array) - 1))
        size = min(draw(st.sampled_from([1, 8, 100, 10**9])), len(array) - start)
        array[start : start + size] = bytes(size)
    elif what == "cut":
        return content[: draw(st.integers(0, len(content)))]
    elif what == "rubbish":
        return draw(st.binary(max_size=200))
    elif what == "grown":
        return content + draw(st.binary(min_size=1, max_size=50))
    return bytes(array)


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """Name and content of a data file."""
    kind = draw(st.sampled_from(["jsonl", "jsonl", "jsonl", "json", "csv", "parquet", "arrow", "stream"]))
    if kind in ("parquet", "arrow", "stream"):
        table = draw(tables())
        try:
            content = parquet(table) if kind == "parquet" else arrow(table, stream=kind == "stream")
        except pa.ArrowInvalid:  # it counts milliseconds, and these seconds have none
            reject()
        content = draw(damaged(content))
    else:
        items = draw(st.lists(rows(), min_size=1, max_size=4))
        content = {"jsonl": lines, "csv": _csv, "json": lambda found: json.dumps(found).encode()}[kind](items)
        if draw(st.integers(0, 5)) == 0:
            content = draw(damaged(content))
    name = "rows." + kind.replace("stream", "arrow")
    if draw(st.integers(0, 7)) == 0:
        return name + ".gz", draw(damaged(gzip.compress(content, mtime=0)))
    return name, content
