"""Data files of every kind, with rows of every kind; and settings of every kind, trained with."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcli.assets import asset
from tests.fuzz import recipes, rows, values
from tests.fuzz.budget import examples
from tests.fuzz.contract import hold, run

_SETTINGS = (
    {},
    {"loss_on": "all"},
    {"format": "text"},
    {"format": "messages", "history": "template"},
    {"history": "last", "reasoning": "drop"},
    {"reasoning": "refuse"},
    {"overlong": "truncate", "max_seq_len": 16},
    {"overlong": "drop", "max_seq_len": 16},
    {"max_bad_rows": 3.0},
    {"chat_template": "chatml"},
    {"chat_template": "llama3"},
    {"chat_template": "mistral"},
    {"chat_template": "gemma-system"},
)

_METHODS = st.sampled_from(["dpo", "orpo", "simpo", "kto", "reward"])
_judged = st.lists(rows.judged(), min_size=1, max_size=3).map(rows.lines)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A working directory, once everything is imported."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        _write(root, recipes.TRAINS, "rows.jsonl", b'{"text": "a"}', {})
        for words in (("check", "r.yaml", "--show-sample", "1"), ("train", "r.yaml", "--resume", "never")):
            assert run(root, *words, "--offline", "--json").status == 0
        (root / "rows.parquet").write_bytes(rows.parquet(rows.pa.Table.from_pylist([{"text": "a"}])))
        run(root, "check", "r.yaml", "--show-sample", "1", "--offline", "--set", "data.train.0.path=rows.parquet")
        yield root


def _write(folder: Path, base: dict[str, Any], name: str, content: bytes, settings: dict[str, Any]) -> None:
    (folder / name).write_bytes(content)
    data = {"train": [{"path": name}], "max_seq_len": 512, **settings}
    (folder / "r.yaml").write_bytes(recipes.written({**base, "data": data}))


@examples(30)
@given(file=rows.files(), settings=st.sampled_from(_SETTINGS), sample=st.sampled_from(["0", "9"]))
def test_data_files_are_read_or_refused(
    folder: Path, file: tuple[str, bytes], settings: dict[str, Any], sample: str
) -> None:
    _write(folder, recipes.TRAINS, *file, settings)
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--as", "cpu", "--show-sample", sample))


@examples(15)
@given(content=_judged, method=_METHODS)
def test_rows_of_pairs_and_labels_are_read_or_refused(folder: Path, content: bytes, method: str) -> None:
    _write(folder, recipes.BASES[method], "rows.jsonl", content, {})
    hold(run(folder, "check", "r.yaml", "--json", "--offline", "--as", "cpu", "--show-sample", "9"))


@examples(1, 5)
@given(file=rows.files(), settings=st.sampled_from(_SETTINGS))
def test_rows_are_trained_on_or_refused(folder: Path, file: tuple[str, bytes], settings: dict[str, Any]) -> None:
    _write(folder, recipes.TRAINS, *file, settings)
    hold(run(folder, "train", "r.yaml", "--json", "--offline", "--resume", "never"), looks_only=False)


@examples(1, 5)
@given(content=_judged, method=_METHODS, settings=st.sampled_from(_SETTINGS))
def test_rows_of_pairs_and_labels_are_trained_on_or_refused(
    folder: Path, content: bytes, method: str, settings: dict[str, Any]
) -> None:
    _write(folder, recipes.BASES[method], "rows.jsonl", content, settings)
    hold(run(folder, "train", "r.yaml", "--json", "--offline", "--resume", "never"), looks_only=False)


@examples(1, 5)
@given(content=st.lists(rows.rows(), min_size=1, max_size=3).map(rows.lines))
def test_rows_are_sampled_from_or_refused(folder: Path, content: bytes) -> None:
    _write(folder, {**recipes.SAMPLES, "grpo": _GRPO}, "rows.jsonl", content, {})
    hold(run(folder, "grpo", "r.yaml", "--json", "--offline", "--resume", "never"), looks_only=False)


@examples(2, 5)
@given(changes=recipes.settings, method=st.sampled_from(["sft", "grpo", "distill", "distill_offline"]))
def test_settings_are_trained_with_or_refused(folder: Path, changes: list[tuple[str, Any]], method: str) -> None:
    _train(folder, changes, method)


@examples(2, 5)
@given(changes=recipes.preferences, method=_METHODS)
def test_preferences_are_trained_with_or_refused(folder: Path, changes: list[tuple[str, Any]], method: str) -> None:
    _train(folder, changes, method)


def _train(folder: Path, changes: list[tuple[str, Any]], method: str) -> None:
    recipe = recipes.changed(recipes.BASES[method], changes)
    (folder / "r.yaml").write_bytes(recipes.written({**recipe, "run": {"output_dir": "out"}}))
    command = "grpo" if method == "grpo" else "train"
    outcome = run(folder, command, "r.yaml", "--json", "--offline", "--resume", "never", "--max-steps", "2")
    hold(outcome, looks_only=False)


_PNG = base64.b64decode(
    json.loads(asset("data", "smoke-vision-train.jsonl").read_text().splitlines()[0])["images"][0].partition(",")[2]
)
_SOURCES = st.one_of(
    st.sampled_from(
        ["a.png", "./a.png", "../a.png", "none.png", "folder", "loop", "fifo", "/dev/zero", "", "~/a.png", "https://x/y.png", "a.png\0", "rows.jsonl",
         "file://a.png", "data:image/png;base64,", "data:,x", "a" * 5000, "\ud800", None, 3, [], {}, {"bytes": None}, {"path": "a.png"}, {"url": "a.png"}]
    ),
    rows.damaged(_PNG).map(lambda content: "data:image/png;base64," + base64.b64encode(content).decode()),
    values.text,
)  # fmt: skip
_PARTS = st.lists(
    st.sampled_from([{"type": "image"}, {"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "video"},
                     {"type": "image", "path": "a.png"}, {"type": "text", "text": "<image>"}, {"type": "text", "text": "<|image_pad|>"}]),
    min_size=1, max_size=3,
)  # fmt: skip


@pytest.mark.long
@examples(2, 40)
@given(
    images=st.lists(_SOURCES, max_size=2) | _SOURCES,
    parts=_PARTS,
    file=rows.damaged(_PNG),
    part=st.sampled_from([["language"], ["projector"], ["vision", "language"]]),
)
def test_rows_with_images(folder: Path, images: Any, parts: list[Any], file: bytes, part: list[str]) -> None:
    (folder / "a.png").write_bytes(file)
    (folder / "folder").mkdir(exist_ok=True)
    for name, make in (("loop", lambda path: path.symlink_to("loop")), ("fifo", os.mkfifo)):
        if not os.path.lexists(folder / name):
            make(folder / name)
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    base = {**recipes.SEES, "model": {**recipes.SEES["model"], "train": part}}
    _write(folder, base, "rows.jsonl", rows.lines([{"images": images, "messages": messages}]), {})
    checked = run(folder, "check", "r.yaml", "--json", "--offline", "--as", "cpu")
    hold(checked)
    trained = run(folder, "train", "r.yaml", "--json", "--offline", "--resume", "never", "--max-steps", "1")
    hold(trained, looks_only=False)
    assert (checked.status == 0) == (trained.status == 0), "what check promises"


_GRPO = {**recipes.SAMPLES["grpo"], "max_prompt_length": 400, "rewards": [{"use": "regex", "pattern": "a"}]}
