"""The first rows of each file: there, readable, and of use to the recipe."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ftcli.errors import Finding
from ftcli.facts.model import read_facts
from ftcli.preflight.checks import data
from ftcli.preflight.checks.context import Context

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
GRPO = "grpo: {max_prompt_length: 64, max_completion_length: 64, rewards: [{use: exact_match}]}\n"


@pytest.fixture
def look(load: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """``look(rows or bytes, name=..., rest=..., command=...)``: findings about one training file."""

    def _look(
        content: Any,
        *overrides: str,
        name: str = "rows.jsonl",
        rest: str = "",
        command: Any = "train",
        tokenizer: str = "bytes",
        source: str = "",
    ) -> Any:
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        if content is not None:
            path.write_bytes(content)
        text = f"model: {{name_or_path: google/gemma-2-2b, tokenizer: {tokenizer}}}\n"
        loaded = load(f"{text}data:\n  train:\n    - {{path: {path}{source}}}\n{rest}", *overrides)
        facts = read_facts(loaded.recipe.model, offline=True, origins=loaded.origins)
        return list(data.check(Context(loaded.recipe, loaded.origins, command), facts, offline=True))

    return _look


def codes(report: Any) -> list[str]:
    return [each.code for each in report if isinstance(each, Finding)]


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "answer": "a"},
        {"instruction": "q", "output": "a"},
        {"text": "some text"},
    ],
)
def test_every_layout_is_recognised(row: Any, look: Callable[..., Any]) -> None:
    assert codes(look([row, row])) == []
    assert codes(look(json.dumps([row]).encode(), name="rows.json")) == []
    assert codes(look(gzip.compress(json.dumps(row).encode()), name="rows.jsonl.gz")) == []


@pytest.mark.parametrize(
    ("content", "name", "code", "row"),
    [
        (None, "rows.jsonl", "FT401", None),
        (b"a,b\n1,2\n", "rows.xlsx", "FT402", None),
        (b'{"text": "a"}\n{"text": \n', "rows.jsonl", "FT403", 2),
        (b'{"text": "a"}\n\n[1]\n', "rows.jsonl", "FT403", 3),
        (b'{"text": "a"}', "rows.json", "FT403", 1),
        (b'{"text": "a"}\n{"text": "b"}\n', "rows.json", "FT403", 2),
        (b"\xff\xfe\x00\x01", "rows.jsonl", "FT403", None),
        (b"not gzip", "rows.jsonl.gz", "FT403", None),
        (b"[" * 100_000 + b"\n", "rows.jsonl", "FT403", 1),
        (b"", "rows.jsonl", "FT404", None),
        (b"\n \n", "rows.jsonl", "FT404", None),
        (b"[]", "rows.json", "FT404", None),
        (b'{"question": "a", "reply": "b"}\n', "rows.jsonl", "FT411", 1),
        (b'{"text": "a"}\n{"txt": "b"}\n', "rows.jsonl", "FT412", 2),
    ],
)
def test_broken_files(content: Any, name: str, code: str, row: int | None, look: Callable[..., Any]) -> None:
    report = look(content, name=name)
    assert codes(report) == [code]
    origin = report[0].origin
    if row is None:
        assert origin.source.endswith("recipe.yaml")
        assert origin.line == 5
    else:
        assert (origin.source.endswith(name), origin.line) == (True, row)


def test_only_the_first_rows_are_read(look: Callable[..., Any]) -> None:
    good = [CHAT] * data.SAMPLE_ROWS
    assert codes(look([*good, {"broken": 1}])) == []
    assert codes(look([*good[:-1], {"broken": 1}])) == ["FT412"]
    assert codes(look([CHAT, {"broken": 1}], source=", max_rows: 1")) == []


def test_renamed_columns(look: Callable[..., Any]) -> None:
    rows = [{"q": "a", "a": "b"}]
    assert codes(look(rows, source=", columns: {prompt: q, completion: a}")) == []
    assert codes(look(rows, source=", columns: {prompt: question}")) == ["FT405"]


def test_a_stated_format_is_held_to(look: Callable[..., Any]) -> None:
    assert codes(look([{"text": "a"}], "data.format=messages")) == ["FT412"]
    assert codes(look([CHAT], "data.format=messages")) == []


@pytest.mark.parametrize(
    ("row", "loss_on", "code"),
    [
        ({"text": "a"}, "assistant", "FT434"),
        ({"text": "a"}, "completion", "FT434"),
        ({"prompt": "a", "completion": "b"}, "assistant", "FT434"),
        ({"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}, "assistant", None),
        (CHAT, "assistant", None),
        ({"text": "a"}, "all", None),
    ],
)
def test_what_is_trained_must_exist(row: Any, loss_on: str, code: str | None, look: Callable[..., Any]) -> None:
    assert codes(look([row], f"data.loss_on={loss_on}")) == ([] if code is None else [code])


def test_chats_need_a_template(look: Callable[..., Any], tmp_path: Path) -> None:
    bare = tmp_path / "tokenizer"
    bare.mkdir()
    (bare / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert codes(look([CHAT], tokenizer=str(bare))) == ["FT421"]
    assert codes(look([CHAT], "data.chat_template=gemma", tokenizer=str(bare))) == []
    assert codes(look([{"text": "a"}], tokenizer=str(bare))) == []


@pytest.mark.parametrize(
    ("row", "setting", "code"),
    [
        ({"prompt": "q", "answer": "1"}, "grpo.num_generations=8", None),
        ({"prompt": "q", "solution": "1"}, "grpo.rewards=[{use: exact_match, answer: solution}]", None),
        ({"prompt": "q", "solution": "1"}, "grpo.num_generations=8", "FT453"),
        ({"prompt": "q", "completion": "1"}, "grpo.num_generations=8", None),
        ({"prompt": "q"}, "grpo.rewards=[{use: regex, pattern: x}]", None),
        ({"text": "q"}, "grpo.rewards=[{use: regex, pattern: x}]", "FT413"),
    ],
)
def test_grpo_rows(row: Any, setting: str, code: str | None, look: Callable[..., Any]) -> None:
    assert codes(look([row], setting, rest=GRPO, command="grpo")) == ([] if code is None else [code])


def test_all_broken_files_are_reported_together(look: Callable[..., Any]) -> None:
    report = look(b"", rest="  eval: [nowhere.jsonl, 'bundled:sample-chatt']\n", command="check")
    assert codes(report) == ["FT404", "FT401", "FT401"]
    assert "sample-chat" in report[2].help


def test_a_json_document_that_is_too_large_is_said_to_be_unread(
    look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "MAX_DOCUMENT", 10)
    report = look(json.dumps([CHAT]).encode(), name="rows.json")
    assert codes(report) == []
    assert "rows.json" in report[0].check


KTO = [{"prompt": f"q{n}", "completion": "a", "label": n % 2 == 0} for n in range(8)]


def kto_as(kind: str) -> bytes:
    """Rows of unpaired preferences as a file of this kind."""
    if kind == "csv":
        return "".join(["prompt,completion,label\n", *(f"q{n},a,{n % 2 == 0}\n" for n in range(8))]).encode()
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(KTO), sink)
    return sink.getvalue()


def test_rows_that_call_some_answers_bad_are_refused(look: Callable[..., Any]) -> None:
    for content, name in ((KTO, "rows.jsonl"), (kto_as("csv"), "rows.csv"), (kto_as("parquet"), "rows.parquet")):
        (finding,) = look(content, name=name)
        assert (finding.code, finding.severity) == ("FT408", "error")
        assert "'label' calls answers bad" in finding.message
    assert codes(look(KTO, source=", remove_columns: [label]")) == []
    assert codes(look(KTO, source=", columns: {quality: label}")) == ["FT409"]


def test_columns_that_nothing_reads_are_named_once(look: Callable[..., Any]) -> None:
    (finding,) = look([{**CHAT, "id": n, "source": "web", "score": 1.0} for n in range(5)])
    assert (finding.code, finding.severity) == ("FT409", "note")
    assert "'id', 'source', 'score'" in finding.message


def test_what_a_judge_reads_is_not_called_unread(look: Callable[..., Any], tmp_path: Path) -> None:
    rows = [{"prompt": "q", "solution": "a", "chosen": "x", "rejected": "y"}]
    (finding,) = look(rows, rest=GRPO.replace("exact_match", "exact_match, answer: solution"), command="grpo")
    assert (finding.code, "'chosen', 'rejected'" in finding.message) == ("FT409", True)
    (tmp_path / "mine.py").write_text("def score(completions, prompts, **columns): return [0.0] * len(completions)\n")
    mine = GRPO.replace("use: exact_match", f"file: '{tmp_path}/mine.py:score'")
    assert codes(look(rows, rest=mine, command="grpo")) == []
    assert codes(look(KTO, rest=mine, command="grpo")) == []
    assert codes(look(KTO, rest=GRPO, command="grpo")) == ["FT408"]


def test_a_column_is_not_both_read_and_removed(load: Callable[..., Any]) -> None:
    source = "{path: d.jsonl, columns: {prompt: question}, remove_columns: [question]}"
    loaded = load(f"model: {{name_or_path: google/gemma-2-2b}}\ndata: {{train: [{source}]}}\n")
    found = list(data.check_sources(Context(loaded.recipe, loaded.origins, "train")))
    assert [finding.code for finding in found] == ["FT257"]
