"""Data sets that are read in windows: the same rows, losses and weights whatever stops the run, and who trains it."""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.cli.app import main
from ftcli.config.data import DatasetConfig, Part, StreamPlace, Window
from ftcli.rows.reading import iterate
from ftcli.rows.row import Row
from tests.e2e.conftest import Bucket, User, merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import STEP, Drills

#: Windows of 14 rows: 4 micro-batches in 2 steps, the last of them with what is left.
STREAMED: dict[str, Any] = {
    "lora": {"dropout": 0.2},
    "data": {"train": ["rows"], "eval": [], "streaming": True, "buffer_size": 14, "num_proc": 1},
    "train": {"max_steps": 7, "gradient_accumulation_steps": 2},
    "checkpoint": {"every_steps": 6, "keep_last": 5},
    "logging": {"every_steps": 3},
}
PACKED: dict[str, Any] = {"data": {"packing": True, "max_seq_len": 160, "buffer_size": 40}}


def chat(word: str) -> str:
    turns = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
    return json.dumps({"messages": turns}) + "\n"


@pytest.fixture
def rows(drills: Drills) -> Path:
    """Three shards of 20 rows."""
    folder = drills.folder / "rows"
    folder.mkdir()
    for shard in range(3):
        words = [f"w{shard}-{n} " + "x" * (n % 9) for n in range(20)]
        (folder / f"part-{shard}.jsonl").write_text("".join(map(chat, words)))
    return folder


def halted(drills: Drills, name: str, change: dict[str, Any], call: int) -> str:
    recipe = drills.recipe(name, **change)
    assert "checkpoint written" in drills.stopped(recipe, STEP, call, signal.SIGTERM, 75)
    return recipe


def counted(run: Path) -> Any:
    return json.loads((run / "tokens.json").read_text())["datasets"]


def test_a_stream_goes_on_in_the_middle_of_a_window(drills: Drills, rows: Path) -> None:
    change = merged(STREAMED, PACKED)
    drills.run(drills.recipe("whole", **change))
    recipe = halted(drills, "halves", change, call=9)
    assert "resuming from" in drills.run(recipe)
    drills.require_same_run("halves", drills.folder / "whole")
    assert counted(drills.folder / "halves") == counted(drills.folder / "whole")


def test_a_window_that_holds_all_rows_is_the_run_without_streaming(drills: Drills, rows: Path) -> None:
    """In each of its passes."""
    change = merged(STREAMED, {"data": {"train": ["rows/part-1.jsonl"], "buffer_size": 50}})
    plain = merged(change, {"data": {"streaming": False}})
    drills.run(drills.recipe("plain", **plain))
    drills.run(drills.recipe("streamed", **change))
    lines, others = drills.metrics("streamed"), drills.metrics("plain")
    assert [line["epoch"] for line in lines if "loss" in line] == [0, 0, 1, 2]
    assert [{**line, "epoch": 0} for line in lines] == [{**line, "epoch": 0} for line in others]
    seen, once = counted(drills.folder / "streamed")[0], counted(drills.folder / "plain")[0]
    thrice = {name: 3 * once[name] for name in once if name.startswith(("rows", "tokens"))}
    assert seen == {**once, **thrice, "counts": {"chats": 60}}


def test_ranks_share_the_windows_that_one_of_them_makes(drills: Drills, rows: Path) -> None:
    change = merged(STREAMED, {"lora": {"dropout": 0.0}, "checkpoint": {"every_steps": 5}})
    drills.run(drills.recipe("alone", **change))
    change = merged(change, {"train": {"gradient_accumulation_steps": 1}})
    run_ranks(drills, drills.recipe("two", **change), 2)
    for line, other in zip(drills.metrics("two"), drills.metrics("alone"), strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert line["tokens"] == other["tokens"]
    assert counted(drills.folder / "two") == counted(drills.folder / "alone")


def test_a_broken_row_ends_the_run_with_a_checkpoint_from_which_it_goes_on_once_it_is_repaired(
    drills: Drills, rows: Path
) -> None:
    change = merged(STREAMED, {"data": {"train": ["rows/part-0.jsonl"], "num_proc": 2}})
    shard = rows / "part-0.jsonl"
    whole = shard.read_text()
    drills.run(drills.recipe("whole", **change))
    shard.write_text("".join([*whole.splitlines(keepends=True)[:16], '{"messages": \n', *whole.splitlines(True)[17:]]))
    recipe = drills.recipe("broken", **change)
    said = drills.run(recipe, status=4)
    assert "rows/part-0.jsonl:17" in said
    assert "FT403" in said
    assert "checkpoints/step-00000002" in said
    shard.write_text(whole)
    drills.run(recipe)
    drills.require_same_run("broken", drills.folder / "whole")


def test_a_shard_that_was_read_and_has_changed_is_refused(drills: Drills, rows: Path) -> None:
    """One that is read to its end by its content, the one that is being read by the window's tokens; others may."""
    recipe = halted(drills, "r", merged(STREAMED, {"data": {"buffer_size": 12}}), call=7)
    state = json.loads((drills.folder / "r/checkpoints/step-00000005/ftcli_state.json").read_text())["extra"]["stream"]
    (place,) = state["places"]
    (read,), current = place["read"], place["shard"]
    for name, code in ((read, "its content is another one"), (current, "window 3 of data.train")):
        before = (drills.folder / name).read_text()
        (drills.folder / name).write_text(before.replace("w", "v"))
        said = drills.run(recipe, status=2)
        assert "FT731" in said
        assert code in said
        (drills.folder / name).write_text(before)
    (unread,) = {f"rows/part-{n}.jsonl" for n in range(3)} - {read, current}
    (drills.folder / unread).write_text(chat("another") * 30)
    drills.run(recipe)


def test_shards_in_a_bucket_and_here_have_their_shares_of_each_window(user: User, bucket: Bucket) -> None:
    """Of the bucket's one at a time is fetched into a cache that has no room for both; rows of groups are skipped."""
    for shard in range(2):
        table = pa.Table.from_pylist([json.loads(chat(f"b{shard}-{n}")) for n in range(30)])
        pq.write_table(table, user.folder / "x.parquet", row_group_size=8)
        bucket.put(f"rows/{shard}.parquet", (user.folder / "x.parquet").read_bytes())
    size = (user.folder / "x.parquet").stat().st_size
    (user.folder / "here.jsonl.gz").write_bytes(gzip.compress("".join(chat(f"h{n}") for n in range(9)).encode()))
    here = str(user.folder / "here.jsonl.gz")
    sources = [{"path": f"{bucket.url}/rows", "weight": 3}, {"path": here, "weight": 1}]
    data = {"train": sources, "eval": [], "streaming": True, "buffer_size": 16, "num_proc": 1, "held_out": 0.2}
    data["remote_cache_gib"] = 1.5 * size / 2**30
    recipe = user.recipe("r", data=data, train={"max_steps": 7}, checkpoint={"every_steps": 5})
    user.capture.readouterr()
    status = main(["train", recipe, "--json", "--quiet"])
    document = json.loads(user.capture.readouterr().out)
    assert status == 0, document["findings"]
    assert document["result"]["eval"]["loss"] > 0
    trained = [each for each in counted(user.folder / "r") if each["split"] == "train"]
    part = DatasetConfig(path=here).with_part(Part(0.2, held_out=False))
    seen = list(iterate(part.with_window(Window(3, 12, ends=False))))  # of three windows, through the end of a pass
    assert trained[1]["rows"] == len(seen)
    assert 20 < trained[0]["rows"] < 36, "all but a fifth of 36 rows, whose shards come in an order of their names"
    assert sum(path.stat().st_size for path in (user.folder / "cache/remote").glob("*.parquet")) <= 1.5 * size
    state = json.loads((user.folder / "r/checkpoints/step-00000005/ftcli_state.json").read_text())
    shard, local = state["extra"]["stream"]["places"]
    assert (shard["row"], local["row"], local["over"]) == (12, 4, 0)
    source = DatasetConfig(path=here).with_window(Window(3, 6, place=StreamPlace(**local)))
    assert [row.number for row in iterate(source) if isinstance(row, Row)] == [5, 6, 7, 8, 9]
