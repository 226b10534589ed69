"""The folder of `ftcli sample`: whole groups or nothing, and nothing of other settings."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ftcli.errors import FtcliError
from ftcli.run.samples import ANSWERS, MANIFEST, SCORES, GroupLog, SampleFolder, key_of

KEYS = [key_of(str(at)) for at in range(10)]


def log(folder: Path, keys: list[str] = KEYS, *, replace: bool = False) -> GroupLog:
    return GroupLog(folder / ANSWERS, keys, 4, lambda record: "n" in record, replace=replace)


def filled(folder: Path, count: int) -> bytes:
    """The content of a file of so many prompts."""
    found = log(folder)
    while found.count < count:
        at = range(found.count, min(found.count + 4, count))
        found.append({"key": KEYS[n], "n": n} for n in at)
    return found.path.read_bytes()


def code(call: Any) -> str:
    with pytest.raises(FtcliError) as caught:
        call()
    return caught.value.findings[0].code


def test_groups_are_read_back(tmp_path: Path) -> None:
    filled(tmp_path, 10)
    again = log(tmp_path)
    assert again.count == 10
    assert [record["n"] for record in again.read(range(3, 7))] == [3, 4, 5, 6]


@pytest.mark.parametrize("lost", [1, 5, 40, 75, 120])
def test_what_a_kill_left_of_a_group_goes(tmp_path: Path, lost: int) -> None:
    whole = filled(tmp_path, 8)
    (tmp_path / ANSWERS).write_bytes(whole[:-lost])
    again = log(tmp_path)
    assert again.count == 4
    again.append({"key": KEYS[n], "n": n} for n in range(4, 8))
    assert again.path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", "7", '{"key": "KEY"}', '{"n": 1e999999', "[" * 100_000])
def test_damaged_lines_are_drawn_again(tmp_path: Path, line: str) -> None:
    lines = filled(tmp_path, 10).decode().splitlines()
    lines[5] = line.replace("KEY", KEYS[5])
    (tmp_path / ANSWERS).write_text("\n".join(lines) + "\n")
    assert log(tmp_path).count == 4


def test_other_prompts_are_refused_unless_they_are_to_be_replaced(tmp_path: Path) -> None:
    filled(tmp_path, 8)
    other = [*KEYS[:5], "another", *KEYS[6:]]
    assert code(lambda: log(tmp_path, other)) == "FT773"
    assert log(tmp_path).count == 8, "nothing was lost"
    assert log(tmp_path, other, replace=True).count == 4


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = log(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert code(lambda: found.append([{"key": KEYS[0], "n": 0}])) == "FT724"
    assert found.count == 0


def test_more_and_fewer_prompts_go_on_with_what_is_there(tmp_path: Path) -> None:
    whole = filled(tmp_path, 10)
    assert log(tmp_path, KEYS[:6]).count == 6
    assert (tmp_path / ANSWERS).read_bytes() == whole
    assert log(tmp_path, [*KEYS, "more"]).count == 8, "the last group was none of four"


def test_lines_beyond_go_where_they_could_not_be_true(tmp_path: Path) -> None:
    whole = filled(tmp_path, 10)
    assert GroupLog(tmp_path / ANSWERS, KEYS[:8], 4, lambda _: True, alone=True).count == 8
    assert whole.startswith((tmp_path / ANSWERS).read_bytes())
    assert len(list(log(tmp_path).read(range(10)))) == 8


def test_a_folder_is_of_one_drawing(tmp_path: Path) -> None:
    def begin(drawn: dict[str, Any], judged: dict[str, Any], *, replace: bool = False) -> bool:
        with SampleFolder(tmp_path) as folder:
            return folder.begin(drawn, judged, replace=replace)

    assert begin({"seed": 1}, {"use": "a"}) is False
    for name in (ANSWERS, SCORES, "sft.jsonl", "mine.txt"):
        (tmp_path / name).write_text("x")
    assert begin({"seed": 1}, {"use": "a"}) is False
    assert (tmp_path / SCORES).exists()
    assert code(lambda: begin({"seed": 2}, {"use": "a"})) == "FT773"
    assert begin({"seed": 1}, {"use": "b"}) is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ANSWERS, "mine.txt", MANIFEST]
    assert begin({"seed": 2}, {"use": "b"}, replace=True) is False
    assert not (tmp_path / ANSWERS).exists()
    assert (tmp_path / "mine.txt").exists()
    (tmp_path / MANIFEST).unlink()
    (tmp_path / "pairs.jsonl").write_text("mine")
    assert code(lambda: begin({"seed": 2}, {"use": "b"})) == "FT773"


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    with SampleFolder(tmp_path):
        assert code(lambda: SampleFolder(tmp_path).__enter__()) == "FT720"
    with SampleFolder(tmp_path):
        pass


def test_rows_are_there_whole_or_as_they_were(tmp_path: Path) -> None:
    with SampleFolder(tmp_path) as folder:
        with folder.writing({"sft": "sft.jsonl"}) as puts:
            puts["sft"]({"text": "half of a pair: \udc80, a break: \u2028", "n": float("nan")})
        assert json.loads((tmp_path / "sft.jsonl").read_text())["text"].startswith("half")
        with pytest.raises(KeyboardInterrupt):
            _stopped(folder)
        assert "half" in (tmp_path / "sft.jsonl").read_text()
        (tmp_path / "pairs.jsonl").mkdir()
        assert code(lambda: _written(folder)) == "FT723"


def _stopped(folder: SampleFolder) -> None:
    with folder.writing({"sft": "sft.jsonl"}) as puts:
        puts["sft"]({"text": "new"})
        raise KeyboardInterrupt


def _written(folder: SampleFolder) -> None:
    with folder.writing({"pairs": "pairs.jsonl"}) as puts:
        puts["pairs"]({"n": 1})


def test_a_file_without_an_end_of_line_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcli.run.samples._MOST_LINE_BYTES", 1 << 20)
    filled(tmp_path, 4)
    with (tmp_path / ANSWERS).open("ab") as file:
        file.truncate(file.tell() + (64 << 20))  # holes
    tracemalloc.start()
    assert log(tmp_path).count == 4
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_links_to_nothing_are_no_file_that_two_share(tmp_path: Path) -> None:
    (tmp_path / ANSWERS).symlink_to("nowhere")
    filled(tmp_path, 4)
    assert not (tmp_path / ANSWERS).is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).mkdir()
    with SampleFolder(tmp_path) as folder, pytest.raises(FtcliError, match=rf"cannot write .*/{MANIFEST}: "):
        folder.begin({"a": 1}, {}, replace=True)
    (tmp_path / "sft.jsonl").mkdir()
    said = pytest.raises(FtcliError, match=r"cannot write .*/sft\.jsonl: ")
    with SampleFolder(tmp_path) as folder, said, folder.writing({"sft": "sft.jsonl"}):
        pass
