"""Reward models on ranks: whole ones, those that hold shards of the weights, and those that share rows."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_families import folder_of
from tests.e2e.test_preference_ranks import lines, require_close_run
from tests.e2e.test_reward import PAIRS
from tests.tiers import telling

#: 20 pairs are five micro-batches: two ranks take three turns an epoch, and one of them has none left in the third. Six
#: held-out pairs are three batches: in the second round one of two ranks has none.
SPREAD = merged(
    PAIRS,
    {
        "model": {"kernels": "reference"},
        "data": {"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 20}]},
        "train": {"max_steps": 4, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
        "reward": {"center_rewards_coefficient": 0.01},
        "eval": {"every_steps": 2, "per_device_eval_batch_size": 2},
        "checkpoint": {"every_steps": 2},
    },
)
TWICE: dict[str, Any] = {"train": {"gradient_accumulation_steps": 2}}
FULL: dict[str, Any] = {"lora": None, "train": {"learning_rate": 1e-3}}
FSDP: dict[str, Any] = {"launch": {"engine": "fsdp"}}


@pytest.mark.long
@pytest.mark.parametrize(
    "change", telling({"LoRA": {}, "all weights": {**FULL, "launch": {"engine": "ddp"}}}, "all weights")
)
def test_two_ranks_are_one_process_that_accumulates_twice(change: dict[str, Any], drills: Drills) -> None:
    """To the last bit."""
    recipe = merged(SPREAD, change)
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert lines(drills, "two") == lines(drills, alone)
    result = "adapter" if recipe.get("lora", {}) is not None else "model"
    require_same_weights(drills.folder / "two" / result, alone / result)


RANKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "shards of the base": (FSDP, 2, 2),
    "shards of a base in NF4": ({"quantization": {"method": "nf4"}, **FSDP}, 2, 2),
    "shards of all weights": ({**FULL, **FSDP}, 2, 2),
    "rows shared": ({"launch": {"engine": "ddp", "context_parallel_size": 2}}, 2, 1),
    "rows shared without padding": (
        {"launch": {"engine": "ddp", "context_parallel_size": 2}, "data": {"padding_free": True}}, 2, 1,
    ),
    "shards, and rows shared": ({**FULL, "launch": {"engine": "fsdp", "context_parallel_size": 2}}, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize(("change", "count", "apart"), telling(RANKS, "rows shared without padding"))
def test_ranks_with_shards_or_shared_rows_are_one_process(
    change: dict[str, Any], count: int, apart: int, drills: Drills
) -> None:
    recipe = merged(SPREAD, change)
    run_ranks(drills, drills.recipe("ranks", **recipe), count)
    alone = merged(recipe, {"launch": {"engine": "single", "context_parallel_size": 1}})
    require_close_run(drills, "ranks", drills.whole(**merged(alone, {"train": {"gradient_accumulation_steps": apart}})))


@pytest.mark.long
@pytest.mark.parametrize("lora", telling({"LoRA": {"r": 4}, "all weights": None}, "LoRA"))
def test_shards_of_a_model_with_a_head_of_its_own(lora: Any, drills: Drills, tmp_path: Path) -> None:
    """The head is frozen, unused and not saved; a run that goes on from a checkpoint is the same one."""
    base = folder_of("llama", tmp_path / "base")
    recipe = merged(SPREAD, {**FSDP, "model": {"name_or_path": str(base), "dtype": "float32"}, "lora": lora})
    alone = drills.whole(**merged(recipe, TWICE))
    written = drills.recipe("two", **recipe)
    ranks = start_ranks(drills, written, 2, prepared={1: (("pause", LOSS, 3),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    assert "weights: sharded over 2 processes" in ranks.said
    run_ranks(drills, written, 2)
    require_close_run(drills, "two", alone)


@pytest.mark.long
def test_weights_that_are_gathered_in_bfloat16_score_in_float32(drills: Drills) -> None:
    """Rounding moves the scores a little; the run is otherwise that of one process."""
    recipe = merged(SPREAD, {**FULL, **FSDP, "model": {"dtype": "bfloat16"}})
    run_ranks(drills, drills.recipe("ranks", **recipe), 2)
    alone = drills.metrics(drills.whole(**merged(merged(recipe, {"launch": {"engine": "single"}}), TWICE)))
    for line, wanted in zip(drills.metrics("ranks"), alone, strict=True):
        for key in ("loss", "eval_loss", "rewards/margins"):
            assert line.get(key) == pytest.approx(wanted.get(key), abs=0.02), key


LOSS = "ftcli.methods.reward.objective:RewardObjective.loss"


@pytest.mark.long
@pytest.mark.parametrize("steps", [3, 1])
def test_stopped_after_any_step_and_resumed_it_is_the_same_run(drills: Drills, steps: int) -> None:
    odd = merged(SPREAD, {**TWICE, "lora": {"dropout": 0.2}, "logging": {"every_steps": 2}})
    whole, recipe = drills.whole(**odd), drills.recipe("halves", **odd)
    drills.stopped(recipe, LOSS, 2 * steps - 1, signal.SIGTERM, 75)
    state = json.loads((drills.folder / f"halves/checkpoints/step-{steps:08}/ftcli_state.json").read_text())
    assert any(state["extra"]["score_sums"]) == (steps != 1)  # the first step has a line of its own
    assert "resuming from" in drills.run(recipe)
    drills.require_same_run("halves", whole)
