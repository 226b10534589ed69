"""Distillation on several ranks is the same run as on one: completions, divergences, weights and numbers."""

from __future__ import annotations

from typing import Any

from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights

CHANGE: dict[str, Any] = {
    "data": {"train": [{"path": "bundled:smoke-grpo-train", "max_rows": 12}], "eval": []},
    "train": {
        "method": "distill", "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
    },
    "distill": {
        "teacher": "bundled:tiny-gemma2", "max_prompt_length": 48, "max_completion_length": 5, "beta": 0.5,
        "temperature": 2.0,
    },
    "checkpoint": {"every_steps": 1, "keep_last": 10},
    "logging": {"every_steps": 1},
}  # fmt: skip


def test_two_ranks_are_one_process_that_accumulates_twice(drills: Drills) -> None:
    twice = {**CHANGE, "train": {**CHANGE["train"], "gradient_accumulation_steps": 2}}
    alone = drills.whole("train", **twice)
    run_ranks(drills, drills.recipe("two", **CHANGE), 2, command="train")
    assert drills.metrics("two") == drills.metrics(alone)
    assert all(line["loss"] > 0 for line in drills.metrics("two") if "loss" in line)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    assert drills.checkpoints("two") == drills.checkpoints(alone)
