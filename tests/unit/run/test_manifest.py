"""manifest.json and the ledgers."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import transformers

import ftcli
from ftcli.errors import FtcliError
from ftcli.run.ledger import (
    DatasetTokens,
    Evaluation,
    Sample,
    Scores,
    TaskScore,
    read_json_object,
    write_evaluation,
    write_tokens,
)
from ftcli.run.manifest import build_manifest, fingerprint, git_state, read_manifest, require_same_data, write_manifest


def build(folder: Path, **more: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    return build_manifest(
        command="train",
        recipe_yaml="version: 1\n",
        device={"name": "cpu"},
        seeds={"run": 42},
        dtype_plan={"compute": "float32"},
        kernels=[{"layer": "model.norm", "kernel": "rms_norm", "on": False, "reason": "no GPU"}],
        data=[fingerprint("rows.jsonl", rows)],
        folder=folder,
        **more,
    )


def test_a_manifest_holds_what_explains_a_run(tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", build(tmp_path, self_check={"loss_difference": float("nan")}))
    manifest = read_manifest(tmp_path / "manifest.json")
    assert manifest["ftcli"] == ftcli.__version__
    assert manifest["libraries"]["transformers"] == transformers.__version__
    assert manifest["git"] is None
    assert manifest["recipe_sha256"] == hashlib.sha256(b"version: 1\n").hexdigest()
    assert manifest["data"] == [
        {"name": "rows.jsonl", "bytes": 14, "sha256": hashlib.sha256(b'{"text": "a"}\n').hexdigest()}
    ]
    assert manifest["kernels"][0]["reason"] == "no GPU"
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
    assert "rows.jsonl has changed since this run began: sha256" in caught.value.findings[0].message


def test_ledgers_are_written_as_plain_json(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.json", [DatasetTokens("a.jsonl", "train", 10, 9, 1, 0, 100, 90, 10, 40, 12)])
    tokens = json.loads((tmp_path / "tokens.json").read_text())
    assert tokens["datasets"][0]["tokens_masked"] == 40
    scores = Scores(loss=float("nan"), tasks=(TaskScore("exact_match", 0.5, 4),))
    write_evaluation(tmp_path / "eval.json", Evaluation(run=scores, samples=(Sample("p", "r", None, "a"),)))
    raw = json.loads((tmp_path / "eval.json").read_text())
    assert raw["run"]["loss"] is None
    assert raw["run"]["tasks"] == [{"name": "exact_match", "value": 0.5, "count": 4}]
    assert raw["samples"][0]["after"] == "a"


def test_a_damaged_json_file_reads_as_empty(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    assert read_json_object(tmp_path / "x.json") == {}
    assert read_json_object(tmp_path / "absent.json") == {}
