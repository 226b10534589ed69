"""`json_valid` with a schema: what fits, schemas that cannot be used, and completions that mean harm."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftcli.config.evaluation import TaskConfig
from ftcli.errors import FtcliError
from ftcli.judges import CompletionBatch, JudgeScores, open_judge
from ftcli.judges.builtin import MAX_DEPTH
from ftcli.methods.grpo import checks as grpo
from ftcli.preflight.checks import crossfield

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}},
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"age": {"type": "integer", "minimum": 0}},
}


def scores(schema: Any, *completions: str, **options: Any) -> JudgeScores:
    judge = open_judge(TaskConfig.model_validate({"use": "json_valid", "json_schema": schema, **options}))
    return judge.scores(CompletionBatch(completions, answers=[""] * len(completions)))


def test_a_value_has_to_fit_the_schema(tmp_path: Path) -> None:
    said = ['{"name": "a", "age": 3}', '{"name": "a"}', '{"age": 3}', '{"name": "a", "age": -1}', "[]", "{", '{"a": 1}']
    wanted = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert scores(PERSON, *said).values == wanted
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    assert scores(str(tmp_path / "person.json"), *said).values == wanted


def test_a_schema_of_an_older_draft_is_read_as_such() -> None:
    older = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"a": {"type": "string"}},
        "items": [{"$ref": "#/definitions/a"}],  # a list of schemas, which 2020-12 calls prefixItems
    }
    assert scores(older, '["x", 1]', "[1]").values == [1.0, 0.0]


def test_a_name_that_looks_like_a_reference_is_none() -> None:
    assert scores({"properties": {"$ref": {"const": {"$ref": "http://x"}}}}, "{}").values == [1.0]


UNUSABLE = {
    "network": ({"$ref": "http://127.0.0.1:9/x.json"}, "refers to what it does not hold, and nothing is fetched"),
    "network, below": (
        {"properties": {"a": {"items": {"$ref": "https://x.y/z"}}}},
        "nothing is fetched: https://x.y/z",
    ),
    "relative to a name": ({"$id": "https://x.y/a", "not": {"$ref": "b.json"}}, "nothing is fetched"),
    "dynamic": ({"$dynamicRef": "http://x.y/z#a"}, "nothing is fetched"),
    "nowhere": ({"$ref": "#/$defs/a"}, "nothing is fetched: '/.defs/a' does not exist"),
    "circle": ({"$ref": "#"}, "refers to itself without end"),
    "type": ({"type": "objec"}, r"is not a JSON Schema at \$.type"),
    "pattern": ({"properties": {"a": {"pattern": "("}}}, r"is not a JSON Schema at \$.properties.a.pattern"),
    "draft": ({"$schema": "http://x.y/z"}, "names a draft that is not known"),
    "file": ("no-such.json", "cannot be read from .*no-such.json: No such file"),
    "device without end": ("/dev/zero", "is no file at /dev/zero"),
}


@pytest.mark.parametrize(("schema", "said"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_schema_that_cannot_be_used_is_refused(
    schema: Any, said: str, monkeypatch: pytest.MonkeyPatch, context: Callable[..., Any]
) -> None:
    monkeypatch.setattr(socket.socket, "connect", None)
    with pytest.raises(FtcliError, match=said) as caught:
        scores(schema)
    assert (caught.value.findings[0].code, caught.value.exit_code) == ("FT280", 2)
    option = f"{{use: json_valid, json_schema: {json.dumps(schema)}}}"
    asked = context(f"data: {{train: [d.jsonl], eval: [e.jsonl]}}\neval: {{tasks: [{option}]}}\n", command="eval")
    rewarded = context(f"data: {{train: [d.jsonl]}}\ngrpo: {{rewards: [{option}]}}\n", command="grpo")
    assert [f.code for f in crossfield.check(asked)] == ["FT280"]
    assert "FT280" in [f.code for f in grpo.check(rewarded)]


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(FtcliError, match="is not JSON"):
        scores(str(tmp_path / "a.json"))


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(FtcliError, match=r"is no file at .*a\.json"):
        scores(str(tmp_path / "a.json"))


def test_depth_is_bounded_whoever_calls() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    anything = {"items": {"$ref": "#"}}
    said = [nested(MAX_DEPTH), nested(MAX_DEPTH + 1), nested(100_000), "[" * 1_000_000, json.dumps("[" * 500)]
    assert scores(anything, *said).values == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert scores(None, *said).values == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_what_takes_too_long_or_overflows_is_not_judged() -> None:
    found = scores({"pattern": "(a+)+$", "multipleOf": 0.5}, json.dumps("a" * 5000 + "!"), "1" * 400, "2", "0.3")
    assert (found.values, found.failed) == ([None, None, 1.0, 0.0], (0, 1))
    assert scores({"multipleOf": 0.5}, "1" * 400, on_error=0.0).values == [0.0]
