"""manifest.json, and the files of results."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers

import ftcli
from ftcli.errors import FtcliError
from ftcli.facts.device import named_device
from ftcli.plain import plain, plain_fields
from ftcli.plan.execution import ExecutionPart
from ftcli.plan.precision import DtypePlan
from ftcli.run.atomic import read_json_object, store_json
from ftcli.run.inputs import (
    Fingerprint,
    Inputs,
    changed_held_out,
    changed_judges,
    fingerprint,
    noted_files,
    require_same_data,
    require_same_inputs,
    weight_identities,
)
from ftcli.run.manifest import build_manifest, git_state
from ftcli.run.results import AnsweredRow, EvalScores, Evaluation, TaskScore, update_evaluation


def build(folder: Path, **more: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    return build_manifest(
        command="train",
        recipe_yaml="version: 1\n",
        device=named_device("cpu"),
        seeds={"run": 42},
        dtype_plan=DtypePlan("float32", None, "float32", False, "no GPU"),
        parts=[ExecutionPart("norms", "transformers", "no GPU")],
        activations={"requested": False, "gradient_checkpointing": False, "reason": "as the recipe says"},
        predicted_memory=None,
        data=[fingerprint("rows.jsonl", rows)],
        folder=folder,
        **more,
    )


def test_a_manifest_holds_what_explains_a_run(tmp_path: Path) -> None:
    added = {"self_check": {"loss_difference": float("nan")}}
    store_json(tmp_path / "manifest.json", {**build(tmp_path), **added})
    manifest = read_json_object(tmp_path / "manifest.json")
    assert manifest["ftcli"] == ftcli.__version__
    assert manifest["libraries"]["transformers"] == transformers.__version__
    assert manifest["git"] is None
    assert manifest["recipe_sha256"] == hashlib.sha256(b"version: 1\n").hexdigest()
    (data,) = manifest["data"]
    assert (data["name"], data["bytes"]) == ("rows.jsonl", 14)
    assert data["sha256"] == hashlib.sha256(b'{"text": "a"}\n').hexdigest()
    assert manifest["parts"][0]["reason"] == "no GPU"
    assert manifest["self_check"] == {"loss_difference": None}


def test_git_commit_and_modification_are_seen(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "modified": True}


def test_nothing_that_a_checkout_names_is_run(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    (tmp_path / ".gitattributes").write_text("* filter=mine\n")
    git("add", ".")
    git("commit", "-qm", "a")
    ran = tmp_path / ".git" / "ran"
    program = tmp_path / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    program.chmod(0o755)
    (tmp_path / ".git" / "hooks").mkdir(exist_ok=True)
    shutil.copy(program, tmp_path / ".git" / "hooks" / "post-index-change")
    for key in ("core.fsmonitor", "filter.mine.clean", "filter.mine.process", "filter.mine.smudge"):
        git("config", key, str(program))
    git("config", "filter.mine.required", "true")
    (tmp_path / "a").write_text("2")  # as long as before: contents have to be compared
    state = git_state(tmp_path)
    assert state is not None
    assert state["modified"] is True
    assert not ran.exists()


def test_a_resumed_run_keeps_its_earlier_processes(tmp_path: Path) -> None:
    first = build(tmp_path)
    second = build(tmp_path, previous=first, resume_step=5)
    assert [p["from_step"] for p in second["processes"]] == [0, 5]
    started_over = build(tmp_path, previous=second)
    assert [p["from_step"] for p in started_over["processes"]] == [0]


def test_changed_data_is_refused_by_name(tmp_path: Path) -> None:
    manifest = build(tmp_path)
    require_same_data(manifest, [fingerprint("rows.jsonl", tmp_path / "rows.jsonl")])
    (tmp_path / "rows.jsonl").write_text('{"text": "b"}\n')
    with pytest.raises(FtcliError) as caught:
        require_same_data(manifest, [fingerprint("rows.jsonl", tmp_path / "rows.jsonl")])
    assert caught.value.findings[0].code == "FT731"
    assert "rows.jsonl has changed since this run began: 14 bytes, sha256" in caught.value.findings[0].message


def rows(folder: Path, count: int, changed: int | None = None) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{n if n != changed else "x" * 9}"}}\n' for n in range(1, count + 1)))
    return path


@pytest.mark.parametrize(("count", "changed"), [(5000, 1), (5000, 2345), (5000, 5000), (80_000, 60_000)])
def test_the_first_difference_is_placed_within_a_few_lines(tmp_path: Path, count: int, changed: int) -> None:
    before = {"data": [plain_fields(fingerprint("rows.jsonl", rows(tmp_path, count)))]}
    path = rows(tmp_path, count, changed)
    with pytest.raises(FtcliError) as caught:
        require_same_data(before, [fingerprint("rows.jsonl", path)], {"rows.jsonl": path})
    first, _, last = caught.value.findings[0].message.split("the first difference is in line ")[1].split()
    low, high = (int(text.replace(",", "")) for text in (first, last))
    assert low <= changed <= high
    assert high - low <= max(300, count // 200)


def test_rows_that_were_added_at_the_end_are_placed_there(tmp_path: Path) -> None:
    before = {"data": [plain_fields(fingerprint("rows.jsonl", rows(tmp_path, 5000)))]}
    path = rows(tmp_path, 9000)
    with pytest.raises(FtcliError) as caught:
        require_same_data(before, [fingerprint("rows.jsonl", path)], {"rows.jsonl": path})
    low = int(caught.value.findings[0].message.split("in line ")[1].split()[0].replace(",", ""))
    assert 4700 < low <= 5001


def test_files_that_came_and_went_are_changes(tmp_path: Path) -> None:
    one, two = Fingerprint("d/1.jsonl", 3, "aa"), Fingerprint("d/2.jsonl", 4, "bb")
    for before, now, text in (([one], [one, two], "absent -> 4 bytes"), ([one, two], [one], "4 bytes, sha256 bb -> ")):
        with pytest.raises(FtcliError, match=r"d/2\.jsonl has changed") as caught:
            require_same_data({"data": plain(before)}, now)
        assert text in caught.value.findings[0].message
    require_same_data({}, [one])


def test_held_out_files_are_compared_under_the_names_that_they_had() -> None:
    one, two = Fingerprint("d/1.jsonl", 3, "aa"), Fingerprint("d/2.jsonl", 4, "bb")
    other = Fingerprint("d/1.jsonl", 3, "cc")
    known = {"held_out": plain([one])}
    assert changed_held_out(known, [one], ["d"]) == changed_held_out(known, [one], ["d/1.jsonl"]) == []
    assert changed_held_out(known, [other], ["d/1.jsonl"]) == ["d/1.jsonl (3 bytes, sha256 aa -> 3 bytes, sha256 cc)"]
    assert changed_held_out(known, [one, two], ["d/"]) == ["d/2.jsonl (absent -> 4 bytes, sha256 bb)"]
    assert changed_held_out(known, [], ["d"]) == ["d/1.jsonl (3 bytes, sha256 aa -> absent)"]
    assert changed_held_out(known, [two], ["d/2.jsonl"]) == []  # the recipe says so
    assert changed_held_out({}, [other], ["d"]) == []


DAMAGED = [5, "x", 1.5, True, {"name": "a"}, [5], [None], [{"name": 3}], [{"name": "a", "bytes": 3}]]
DAMAGED += [[{"name": "a", "bytes": "x", "sha256": "y"}], [{"name": "a", "bytes": 3, "sha256": 7}, "rest"]]


@pytest.mark.parametrize("damage", DAMAGED, ids=json.dumps)
def test_a_damaged_list_of_files_proves_nothing(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    one, now = (
        Fingerprint("a", 3, "aa"),
        Inputs("t", "t1", weight_identities(tmp_path), None, (Fingerprint("a", 3, "b"),)),
    )
    assert noted_files(damage) == {}
    previous = dict.fromkeys(("data", "held_out", "judges"), damage)
    require_same_data(previous, [one])
    assert changed_held_out(previous, [one], ["a"]) == changed_judges(previous, [one]) == []
    require_same_inputs({"inputs": {"files": damage, "weights": damage, "tokens_sha256": 7}}, now)
    require_same_inputs({"inputs": damage}, now)


@pytest.mark.parametrize("block", [("block_bytes", "x"), ("block_bytes", -4), ("blocks", 7)])
def test_a_damaged_place_is_left_out(tmp_path: Path, block: tuple[str, Any]) -> None:
    before = {**plain_fields(fingerprint("rows.jsonl", rows(tmp_path, 50))), block[0]: block[1]}
    path = rows(tmp_path, 50, 7)
    with pytest.raises(FtcliError, match=r"rows\.jsonl has changed since this run began") as caught:
        require_same_data({"data": [before]}, [fingerprint("rows.jsonl", path)], {"rows.jsonl": path})
    assert "first difference" not in caught.value.findings[0].message


def test_inputs_are_compared_where_they_are_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(3_000_000))
    now = Inputs("a\nb\n", "t1", weight_identities(tmp_path), None)
    known = {"inputs": json.loads(json.dumps(plain_fields(now)))}
    require_same_inputs(known, now)
    require_same_inputs({}, now)
    cases = {
        "FT734": Inputs("a\nc\n", "t2", now.weights, None),
        "FT731": Inputs("a\nb\n", "t2", now.weights, None),
        "FT735": Inputs("a\nb\n", "t1", (), None),
    }
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(2_999_999)
        file.write(b"x")
    for code, changed in [*cases.items(), ("FT735", Inputs("a\nb\n", "t1", weight_identities(tmp_path), None))]:
        with pytest.raises(FtcliError) as caught:
            require_same_inputs(known, changed)
        assert [f.code for f in caught.value.findings] == [code]
        assert caught.value.exit_code == 2
    with pytest.raises(FtcliError, match="commit abc -> def"):
        require_same_inputs({"inputs": plain_fields(Inputs(commit="abc"))}, Inputs(commit="def"))


def test_what_a_run_began_with_stays_in_its_manifest(tmp_path: Path) -> None:
    first = {**build(tmp_path), "inputs": {"tokens_sha256": "t1"}}
    assert build(tmp_path, previous=first, resume_step=5)["inputs"] == {"tokens_sha256": "t1"}
    assert "inputs" not in build(tmp_path, previous=first)


def test_an_evaluation_is_written_as_plain_json(tmp_path: Path) -> None:
    scores = EvalScores(loss=float("nan"), tasks=(TaskScore("exact_match", 0.5, 4),))
    store_json(tmp_path / "eval.json", Evaluation(run=scores, samples=(AnsweredRow("p", "r", None, "a"),)))
    raw = json.loads((tmp_path / "eval.json").read_text())
    assert raw["run"]["loss"] is None
    assert raw["run"]["tasks"] == [{"name": "exact_match", "value": 0.5, "count": 4, "cut": 0}]
    assert raw["samples"][0]["after"] == "a"


def test_a_damaged_json_file_reads_as_empty(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    assert read_json_object(tmp_path / "x.json") == {}
    assert read_json_object(tmp_path / "absent.json") == {}


def test_an_evaluation_keeps_what_it_does_not_measure(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    tasks = (TaskScore("a", 0.5, 4), TaskScore("b", 0.25, 4))
    samples = (AnsweredRow("p", None, "x", "y", "a"), AnsweredRow("q", None, "x", "y", "b"), AnsweredRow("plain"))
    first = EvalScores(loss=2.0, tokens=9, tasks=tasks, datasets={"d": {"loss": 2.0}}, lm_eval={"mmlu": {"acc": 0.3}})
    update_evaluation(path, Evaluation(first, first, samples))
    again = EvalScores(tasks=(TaskScore("b", 0.75, 4),), lm_eval={"arc": {"acc": 0.1}})
    update_evaluation(path, Evaluation(again, again, (AnsweredRow("q", None, "x", "z", "b"),)))
    update_evaluation(path, Evaluation(None, EvalScores(loss=1.0, tokens=5)))
    raw = json.loads(path.read_text())
    for side, loss, datasets in (("base", 2.0, {"d": {"loss": 2.0}}), ("run", 1.0, {})):
        assert {task["name"]: task["value"] for task in raw[side]["tasks"]} == {"a": 0.5, "b": 0.75}
        assert (raw[side]["loss"], raw[side]["datasets"]) == (loss, datasets)
        assert set(raw[side]["lm_eval"]) == {"mmlu", "arc"}
    assert [(row["prompt"], row["after"]) for row in raw["samples"]] == [("q", "z"), ("p", "y"), ("plain", None)]


def test_a_damaged_evaluation_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    for damaged in ("[1]", '{"run": 7, "samples": 3}', '{"run": {"tasks": 5, "lm_eval": []}}'):
        path.write_text(damaged)
        update_evaluation(path, Evaluation(run=EvalScores(tasks=(TaskScore("b", 0.75, 4),))))
        assert json.loads(path.read_text())["run"]["tasks"][0]["name"] == "b"
