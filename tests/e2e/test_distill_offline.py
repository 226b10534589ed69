"""Offline distillation as a user runs it: the teacher is asked once, its folder is enough afterwards, and nothing else
than what it was asked about is ever read from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from ftcli.assets import asset
from ftcli.data.tokens import TokenizedRow, unit_digest
from ftcli.methods.distill.stored import PartWriter
from tests.e2e.conftest import User
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights

TRAIN: dict[str, Any] = {
    "method": "distill_offline", "max_steps": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
    "per_device_train_batch_size": 2,
}  # fmt: skip
DATA: dict[str, Any] = {"train": [{"path": "bundled:smoke-train", "max_rows": 12}], "eval": []}
TEACHER = "bundled:tiny-gemma2"


def _distill(user: User, **more: Any) -> dict[str, Any]:
    return {"teacher": TEACHER, "teacher_logprobs": str(user.folder / "kept"), "teacher_top_k": 5, **more}


def _codes(document: Any) -> list[str]:
    return [one["code"] for one in document["findings"] if one["severity"] == "error"]


@pytest.mark.parametrize(
    ("change", "beta"),
    [
        ({}, 0.0),
        ({"data": {**DATA, "packing": True}, "model": {"kernels": "reference"}}, 1.0),
        ({"lora": None, "distill": {"teacher_quantization": "nf4", "temperature": 2.0}}, 0.5),
    ],
    ids=["adapters, forward", "packed on the kernels, reverse", "full, teacher in NF4"],
)
def test_a_run_learns_goes_on_alike_and_needs_no_teacher_again(
    change: dict[str, Any], beta: float, narrow: User
) -> None:
    changes: dict[str, Any] = {"train": TRAIN, "data": DATA, "checkpoint": {"every_steps": 3}, **change}
    distill = _distill(narrow, beta=beta, **change.get("distill", {}))
    recipe = narrow.recipe("r", **{**changes, "distill": distill})
    narrow.done("train", recipe)
    lines = [line for line in narrow.metrics("r") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(0 <= line["teacher_agreement"] <= 1 and line["entropy"] > 0 for line in lines)
    narrow.goes_on_alike("r", recipe, "train")
    alone = narrow.recipe("alone", **{**changes, "distill": {**distill, "teacher": None}})
    narrow.done("train", alone)
    assert narrow.losses("alone") == narrow.losses("r")
    result = "model" if "lora" in change else "adapter"
    require_same_weights(narrow.folder / "alone" / result, narrow.folder / "r" / result)


def test_what_is_stored_is_the_teachers_distribution(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the teacher itself there is nothing to learn: it agrees with itself at every token."""
    rows: dict[bytes, TokenizedRow] = {}
    add = PartWriter.add

    def noting(writer: PartWriter, some: Sequence[TokenizedRow], top: Any) -> None:
        rows.update({unit_digest(row): row for row in some})
        add(writer, some, top)

    monkeypatch.setattr(PartWriter, "add", noting)
    distill = _distill(user, beta=0.5)
    user.done("train", user.recipe("r", train={**TRAIN, "max_steps": 1}, data=DATA, distill=distill))
    (line,) = (line for line in user.metrics("r") if "loss" in line)
    assert abs(line["loss"]) < 1e-6
    assert line["teacher_agreement"] == 1.0
    told = json.loads((user.folder / "kept" / "teacher.json").read_text())
    assert (told["teacher"], told["teacher_top_k"], told["temperature"]) == (TEACHER, 5, 1.0)
    (path,) = (user.folder / "kept").glob("*.safetensors")
    kept = load_file(path)
    assert kept["rows"].shape == (4, 16)  # those of one step alone
    assert kept["ends"][-1] == len(kept["ids"]) == len(kept["rest"])
    mass = np.exp(kept["log_probs"].astype(np.float64)).sum(1) + np.exp(kept["rest"].astype(np.float64))
    assert np.abs(mass - 1).max() < 1e-5
    model = AutoModelForCausalLM.from_pretrained(asset("models", "tiny-gemma2"), dtype=torch.float32)
    start = 0
    for digest, end in zip(kept["rows"], kept["ends"], strict=True):
        row = rows[digest.tobytes()]
        with torch.no_grad():
            whole = torch.log_softmax(model(torch.tensor([row.input_ids])).logits[0].double(), -1)
        where = [at for at, label in enumerate(row.labels[1:]) if label != -100]
        wanted = whole[where].topk(5)
        assert np.abs(kept["log_probs"][start:end] - wanted.values.numpy()).max() < 1e-4
        assert (kept["ids"][start:end] == wanted.indices.numpy()).mean() > 0.99
        start = end
    packed = user.recipe(
        "packed", train=TRAIN, data={**DATA, "packing": True}, model={"kernels": "reference"}, distill=distill
    )
    user.done("train", packed, "--max-steps", "1")
    (line,) = (line for line in user.metrics("packed") if "loss" in line)
    assert abs(line["loss"]) < 1e-5
    assert line["teacher_agreement"] > 0.99  # each position has its own row's teacher


def test_rows_that_are_not_there_are_asked_and_no_others(narrow: User) -> None:
    def parts() -> set[Path]:
        return set((narrow.folder / "kept").glob("*.safetensors"))

    distill = _distill(narrow)
    narrow.done("train", narrow.recipe("r", train=TRAIN, data=DATA, distill=distill))
    first = parts()
    more = {**DATA, "train": [{"path": "bundled:smoke-train", "max_rows": 14}]}
    status, document = narrow.run(
        "train", narrow.recipe("few", train=TRAIN, data=more, distill={**distill, "teacher": None})
    )
    assert status == 4
    assert _codes(document) == ["FT474"]
    assert "of the rows that are trained on, such as this one, are not in" in str(document["findings"])
    narrow.done("train", narrow.recipe("more", train=TRAIN, data=more, distill=distill))
    assert first < parts()
    assert sum(len(load_file(path)["rows"]) for path in parts()) == 14


#: What is changed of the settings that the folder was made with, and what is said of it.
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"teacher_logprobs": None}, "is absent"),
    ({"teacher_logprobs": "nowhere", "teacher": None}, "holds no log-probabilities"),
    ({"temperature": 2.0}, "of another temperature: 1.0 there, 2.0 here"),
    ({"teacher_top_k": 6, "teacher": None}, "of another teacher_top_k: 5 there, 6 here"),
    ({"teacher_quantization": "nf4"}, "of another quantization"),
]


def test_a_folder_of_something_else_is_refused(narrow: User) -> None:
    distill = _distill(narrow)
    narrow.done("train", narrow.recipe("r", train={**TRAIN, "max_steps": 1}, data=DATA, distill=distill))
    for change, said in OTHERS:
        recipe = narrow.recipe("s", train=TRAIN, data=DATA, distill={**distill, **change})
        for command in ("check", "train"):
            status, document = narrow.run(command, recipe)
            assert (status, _codes(document)) == (2, ["FT474"]), change
            assert said in str(document["findings"])


@pytest.mark.parametrize("said", ["{", "[1]", '{"vocabulary": "x"}', '{"vocabulary": null, "teacher_top_k": 5}'])
@pytest.mark.parametrize("teacher", [None, "bundled:tiny-gemma2"])
def test_a_folder_that_says_nothing_sensible_is_refused_by_check(said: str, teacher: str | None, narrow: User) -> None:
    """A vocabulary that is no number was FT190; what no run could read was no problem to check."""
    (narrow.folder / "kept").mkdir()
    (narrow.folder / "kept" / "teacher.json").write_text(said, encoding="utf-8")
    recipe = narrow.recipe("s", train=TRAIN, data=DATA, distill={**_distill(narrow), "teacher": teacher})
    status, document = narrow.run("check", recipe)
    assert (status, set(_codes(document))) == (2, {"FT474"}), document


def test_a_teacher_or_part_that_has_changed_is_refused(narrow: User) -> None:
    """The same name, other weights; a part of another folder; a part that is damaged; tokens that are others."""
    kept, distill = narrow.folder / "kept", _distill(narrow)
    changes: dict[str, Any] = {"train": {**TRAIN, "max_steps": 1}, "data": DATA}
    narrow.done("train", narrow.recipe("r", **changes, distill=distill))

    def refused(name: str, said: str, teacher: str | None = None) -> None:
        recipe = narrow.recipe(name, **changes, distill={**distill, "teacher": teacher})
        status, document = narrow.run("train", recipe)
        assert (status, _codes(document)) == (4, ["FT474"]), document
        assert said in str(document["findings"])

    told = json.loads((kept / "teacher.json").read_text())
    for key, teacher, said in (
        ("weights", TEACHER, "of another weights"),
        ("tokens", None, "of another tokens"),
        ("ftcli", None, "was written of another teacher than"),
    ):
        (kept / "teacher.json").write_text(json.dumps({**told, key: "0" * 32}))
        refused(f"of {key}", said, teacher)
    (kept / "teacher.json").write_text(json.dumps(told))
    (part,) = kept.glob("*.safetensors")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused("damaged", "is damaged")
    part.write_bytes(whole[:-9])
    refused("short", "cannot be read")


def test_a_run_is_held_to_the_teacher_that_it_began_with(narrow: User) -> None:
    kept, distill = narrow.folder / "kept", _distill(narrow, teacher=TEACHER)
    changes: dict[str, Any] = {"train": TRAIN, "data": DATA, "checkpoint": {"every_steps": 1}}
    narrow.done("train", narrow.recipe("first", **changes, distill=distill))
    alone = narrow.recipe("r", **changes, distill={**distill, "teacher": None})
    narrow.done("train", alone)
    narrow.cut_off("r")
    told = json.loads((kept / "teacher.json").read_text())
    for path in kept.iterdir():
        path.unlink()
    narrow.done("train", narrow.recipe("again", **changes, distill={**distill, "teacher_quantization": "nf4"}))
    assert json.loads((kept / "teacher.json").read_text()) != told
    status, document = narrow.run("train", alone)
    assert status == 2
    assert "FT735" in _codes(document)


def test_settings_of_the_other_kind_are_refused(user: User) -> None:
    changes: dict[str, Any] = {"train": TRAIN, "data": DATA}
    status, document = user.run("check", user.recipe("r", **changes, distill=_distill(user, top_p=0.5)))
    assert (status, _codes(document)) == (2, ["FT276"])
    changes = {"train": {**TRAIN, "method": "distill"}, "data": {**DATA, "train": ["bundled:smoke-grpo-train"]}}
    lengths = {"max_prompt_length": 40, "max_completion_length": 4}
    status, document = user.run("check", user.recipe("r", **changes, distill=_distill(user, **lengths)))
    assert (status, _codes(document)) == (2, ["FT276", "FT276"])


def test_two_ranks_are_one_process_that_accumulates_twice(drills: Drills) -> None:
    change: dict[str, Any] = {
        "data": {**DATA, "train": [{"path": "bundled:smoke-train", "max_rows": 11}]},
        "train": {**TRAIN, "max_steps": 3, "gradient_accumulation_steps": 1},
        "distill": {"teacher": TEACHER, "teacher_logprobs": str(drills.folder / "kept"), "beta": 0.5},
        "logging": {"every_steps": 1},
    }
    run_ranks(drills, drills.recipe("two", **change), 2, command="train")
    twice = {**change, "train": {**change["train"], "gradient_accumulation_steps": 2}}
    twice["distill"] = {**change["distill"], "teacher": None}
    alone = drills.whole("train", **twice)
    assert drills.metrics("two") == drills.metrics(alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
