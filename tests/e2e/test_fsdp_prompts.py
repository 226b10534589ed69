"""Methods on prompts with weights that are sharded over ranks (``launch.engine: fsdp``): the run of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_fsdp import require_close_run
from tests.e2e.test_ranks_grpo import CHANGE, twice

FSDP: dict[str, Any] = {"launch": {"engine": "fsdp"}}
REF = {"model": {"kernels": "reference"}}
UNEVEN = {"train": {"max_steps": 6, "per_device_train_batch_size": 4},
   "grpo": {"num_generations": 4, "max_completion_length": 12, "stop_strings": list("abcdefghijklmnopqrstuvwxyz .,ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
            "max_resample_times": 3, "rewards": [{"use": "regex", "pattern": "[0-9]"}]}}

CASES = {
  "plain": {},
  "ref": REF,
  "nf4": merged(REF, {"quantization": {"method": "nf4"}}),
  "fp8": merged(REF, {"quantization": {"method": "fp8"}}),
  "uneven": merged(REF, UNEVEN),
  "full": {"lora": None, "train": {"learning_rate": 1e-4}},
  "fullref": merged(REF, {"lora": None, "train": {"learning_rate": 1e-4}}),
  "again": merged(REF, {"train": {"gradient_checkpointing": True}}),
  "silent": merged(REF, {"grpo": {"beta": 0.0, "num_generations": 2, "rewards": [{"use": "regex", "pattern": "[0-4]"}]},
     "train": {"per_device_train_batch_size": 2}}),
  "agent": {
        "model": {"name_or_path": "bundled:tiny-agent", "dtype": "float32"},
        "data": {"train": [{"path": "bundled:smoke-agent-train", "max_rows": 12}], "eval": [], "max_seq_len": 256},
        "train": {**CHANGE["train"], "max_steps": 2, "per_device_train_batch_size": 4},
        "grpo": {
            "num_generations": 4, "max_prompt_length": 80, "max_completion_length": 140,
            "environment": {"file": "bundled:desk.py:Desk"}, "rewards": [{"use": "exact_match"}],
        },
        "eval": {"tasks": [], "every_steps": None},
    }
}

@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_x(case, layer, drills: Drills) -> None:
    change = merged(merged(CHANGE, FSDP), CASES[case])
    alone = drills.whole("grpo", **twice(change))
    ranks = start_ranks(drills, drills.recipe("two", **change), 2, command="grpo", prepared={1: (("no_room_for_all",),)} if layer else None)
    assert ranks.ended() == [0, 0], ranks.said
    assert ("layer by layer" if layer else "once a step") in ranks.said
    if "full" in case:
        require_close_run(drills, "two", alone)
    else:
        assert drills.metrics("two") == drills.metrics(alone)
        require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    for m in drills.metrics("two"):
        if "loss" in m: print(case, m["loss"], m.get("completions/mean_length"), m.get("completions/min_length"), m.get("groups_drawn_again"))


from tests.e2e.test_ranks_distill import CHANGE as DISTILL
DCASES = {
 "other": {},
 "full": {"lora": None, "train": {"learning_rate": 1e-4}},
 "nf4 teacher": merged(REF, {"distill": {"teacher_quantization": "nf4"}}),
 "full nf4 teacher": merged(REF, {"lora": None, "distill": {"teacher_quantization": "nf4"}}),
 "base": merged(REF, {"distill": {"teacher": None, "teacher_column": "answer"}}),
 "nf4 base": merged(REF, {"quantization": {"method": "nf4"}, "distill": {"teacher": None, "teacher_column": "answer"}}),
}
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("case", DCASES)
def test_d(case, layer, drills: Drills) -> None:
    change = merged(merged(DISTILL, FSDP), DCASES[case])
    alone = drills.whole("train", **twice(change))
    ranks = start_ranks(drills, drills.recipe("two", **change), 2, command="train", prepared={1: (("no_room_for_all",),)} if layer else None)
    assert ranks.ended() == [0, 0], ranks.said
    assert ("layer by layer" if layer else "once a step") in ranks.said
    for m, a in zip(drills.metrics("two"), drills.metrics(alone)):
        if "loss" in m: print(case, m["loss"], a["loss"], m.get("completions/mean_length"))
    if "full" in case:
        require_close_run(drills, "two", alone)
    else:
        assert drills.metrics("two") == drills.metrics(alone)
        require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
