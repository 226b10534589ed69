"""What a recipe can say is the same on two ranks as in one process that accumulates twice as much, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.tiers import further

BASE: dict[str, Any] = {
    "train": {"max_steps": 4, "lr_scheduler_type": "constant"},
    "eval": {"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 0},
}
FEATURES: dict[str, dict[str, Any]] = {
    "full fine-tuning, packed rows, schedule-free": {
        "lora": None,
        "data": {"packing": True, "max_seq_len": 128},
        "train": {"learning_rate": 1e-4, "optim": "schedule_free_adamw"},
    },
    "NF4 in bfloat16, layers run again, rows of like length": {
        "model": {"dtype": "bfloat16"},
        "quantization": {"method": "nf4"},
        "train": {"gradient_checkpointing": True, "train_sampling_strategy": "group_by_length"},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*list(FEATURES)[:1], *further(*list(FEATURES)[1:])])
def test_two_ranks_are_one_process_that_accumulates_twice(name: str, drills: Drills) -> None:
    change = merged(BASE, FEATURES[name])
    drills.run(drills.recipe("alone", **merged(change, {"train": {"gradient_accumulation_steps": 2}})))
    run_ranks(drills, drills.recipe("two", **change), 2)
    assert drills.metrics("two") == drills.metrics("alone")
    result = "adapter" if (drills.folder / "two" / "adapter").is_dir() else "model"
    require_same_weights(drills.folder / "two" / result, drills.folder / "alone" / result)
