"""Distillation as a user runs it: from another model, and from the base that sees more; it resumes to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import User

DISTILL: dict[str, Any] = {"teacher": "bundled:tiny-gemma2", "max_prompt_length": 58, "max_completion_length": 6}
DATA: dict[str, Any] = {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 12}], "eval": []}
TRAIN: dict[str, Any] = {"method": "distill", "max_steps": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
TRAIN["per_device_train_batch_size"] = 2

SETTINGS: dict[str, dict[str, Any]] = {
    "adapters, reverse": {"checkpoint": {"every_steps": 3}},
    "full, forward, on the kernels' torch form": {
        "lora": None, "distill": {**DISTILL, "beta": 0.0}, "model": {"kernels": "reference"},
        "train": {**TRAIN, "gradient_checkpointing": True},
    },
    "a teacher in NF4, Jensen-Shannon": {"distill": {**DISTILL, "beta": 0.5, "teacher_quantization": "nf4"}},
    "the base that sees the answer": {"distill": {**DISTILL, "teacher": None, "teacher_column": "answer"}},
}  # fmt: skip


@pytest.mark.parametrize("name", list(SETTINGS))
def test_a_run_learns_and_goes_on_alike(name: str, narrow: User) -> None:
    change: dict[str, Any] = {"train": TRAIN, "distill": DISTILL, "data": DATA, "checkpoint": {"every_steps": 3}}
    recipe = narrow.recipe("r", **{**change, **SETTINGS[name]})
    narrow.done("train", recipe)
    lines = [line for line in narrow.metrics("r") if "loss" in line]
    assert all(line["loss"] > 0 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines[1:])
    assert {"entropy", "teacher_agreement", "completions/mean_length", "seconds/rollout"} <= lines[0].keys()
    inputs = json.loads((narrow.folder / "r" / "manifest.json").read_text())
    assert ("asked" in json.dumps(inputs)) or SETTINGS[name].get("distill", DISTILL)["teacher"] is None
    narrow.goes_on_alike("r", recipe, "train")


def test_the_divergence_falls(narrow: User) -> None:
    """Of a few prompts, in a few dozen steps: the student is random."""
    data = {**DATA, "train": [{"path": "bundled:smoke-grpo-train", "max_rows": 4}]}
    train = {**TRAIN, "max_steps": 40, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    recipe = narrow.recipe("r", train=train, distill={**DISTILL, "max_completion_length": 3}, data=data, lora=None)
    narrow.done("train", recipe)
    losses = narrow.losses("r")
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"distill": {**DISTILL, "teacher": None}}, "FT288", "learn from itself"),
        ({"distill": {**DISTILL, "teacher": None, "teacher_column": "answer"}, "lora": None}, "FT288", "from itself"),
        (
            {"distill": {**DISTILL, "teacher": None, "teacher_column": "answer"},
             "lora": {"r": 4, "init_lora_weights": "pissa"}},
            "FT274", "without adapters",
        ),
        (
            {"distill": {**DISTILL, "teacher": None, "teacher_column": "answer", "teacher_quantization": "nf4"}},
            "FT276", "not read without",
        ),
        ({"distill": {**DISTILL, "max_completion_length": 60}}, "FT262", "exceeds data.max_seq_len"),
        ({"train": {**TRAIN, "neftune_noise_alpha": 5.0}}, "FT250", "not supported by distillation"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(change: dict[str, Any], code: str, said: str, user: User) -> None:
    recipe = user.recipe("r", **{"train": TRAIN, "distill": DISTILL, "data": DATA, **change})
    status, document = user.run("train", recipe)
    assert status == 2
    assert [one["code"] for one in document["findings"] if one["code"] == code and said in one["message"]]


def test_a_column_that_the_teacher_is_to_see_must_be_there(user: User) -> None:
    distill = {**DISTILL, "teacher": None, "teacher_column": "hint"}
    recipe = user.recipe("r", train=TRAIN, distill=distill, data=DATA)
    for command in ("check", "train"):
        status, document = user.run(command, recipe)
        assert status == 4
        (found,) = (one for one in document["findings"] if one["severity"] == "error")
        assert found["code"] == "FT453"
        assert "'hint'" in found["message"]


def test_a_teacher_with_other_tokens_is_refused(user: User, tmp_path: Path) -> None:
    other = tmp_path / "other"
    source = Path(str(user.model["name_or_path"]).replace("bundled:", ""))
    from ftcli.assets import asset

    folder = asset("models", source.name)
    other.mkdir()
    for path in folder.iterdir():
        text = path.read_bytes()
        if path.name == "tokenizer.json":
            document = json.loads(text)
            names = document["model"]["vocab"]
            a, b = list(names)[40:42]
            names[a], names[b] = names[b], names[a]
            text = json.dumps(document).encode()
        (other / path.name).write_bytes(text)
    recipe = user.recipe("r", train=TRAIN, distill={**DISTILL, "teacher": str(other)}, data=DATA)
    status, document = user.run("train", recipe)
    assert status == 3
    assert "FT326" in [one["code"] for one in document["findings"]]


def test_too_few_prompts(user: User) -> None:
    data = {**DATA, "train": [{"path": "bundled:smoke-grpo-train", "max_rows": 3}]}
    status, document = user.run("train", user.recipe("r", train=TRAIN, distill=DISTILL, data=data))
    assert status == 4
    assert "FT261" in [one["code"] for one in document["findings"]]
