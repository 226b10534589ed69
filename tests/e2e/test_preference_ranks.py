"""Learning from pairs on ranks that hold shards of the weights, or share rows: the run of one process."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import merged
from tests.e2e.ranks import Ranks, run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_preference import LOSS, pairs
from tests.tiers import telling

#: 20 pairs are five micro-batches: two ranks take three turns an epoch, and one of them has none left in the third. Six
#: held-out pairs are three batches: in the second round one of two ranks has none.
PAIRS = pairs(
    model={"kernels": "reference"},
    data={"train": [{"path": "bundled:smoke-dpo-train", "max_rows": 20}]},
    train={"max_steps": 4, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4},
    eval={"every_steps": 2, "per_device_eval_batch_size": 2, "samples": 1, "generate": {"max_new_tokens": 2}},
    checkpoint={"every_steps": 2},
    preference={"sft_weight": 0.2, "ld_alpha": 0.5},
)
FSDP: dict[str, Any] = {"launch": {"engine": "fsdp"}}
#: The reference is computed in each step; tests/e2e/test_reference_ranks.py has it ahead of training.
LIVE: dict[str, Any] = {"preference": {"reference_cache": "off"}}
FULL: dict[str, Any] = {"lora": None, "train": {"learning_rate": 1e-3}}
TWICE: dict[str, Any] = {"train": {"gradient_accumulation_steps": 2}}
#: Of an epoch of five micro-batches one process makes five turns, and two ranks make six.
UNEVEN = ("epoch", "tokens_computed")


def lines(drills: Drills, run: str | Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in UNEVEN} for line in drills.metrics(run)]


def require_close_run(drills: Drills, name: str, other: Path) -> None:
    """All numbers and weights, to what sums in another order change."""
    for line, wanted in zip(lines(drills, name), lines(drills, other), strict=True):
        assert line.keys() == wanted.keys()
        for key, value in wanted.items():
            assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    result = "adapter" if (other / "adapter").is_dir() else "model"
    (file,) = (path.name for path in (other / result).glob("*.safetensors"))
    found, kept = (load_file(run / result / file) for run in (drills.folder / name, other))
    assert found.keys() == kept.keys()
    for key, tensor in kept.items():
        assert (found[key] - tensor).norm() <= 1e-3 * tensor.norm(), key


ADAPTED: dict[str, dict[str, Any]] = {
    "nf4, layers again": {"quantization": {"method": "nf4"}, "train": {"gradient_checkpointing": True}, **LIVE},
    "offload, no padding": {"train": {"gradient_checkpointing": "offload"}, "data": {"padding_free": True}, **LIVE},
    "ahead of training": {},
    "fp8, compared with nothing": {"quantization": {"method": "fp8"}, "train": {"method": "simpo"}},
}


@pytest.mark.parametrize("change", telling(ADAPTED, "nf4, layers again"))
def test_two_ranks_with_shards_of_the_base_are_one_process_bit_for_bit(change: dict[str, Any], drills: Drills) -> None:
    recipe = merged(merged(PAIRS, FSDP), change)
    alone = drills.whole(**merged(recipe, TWICE))
    run_ranks(drills, drills.recipe("two", **recipe), 2)
    assert lines(drills, "two") == lines(drills, alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    assert drills.checkpoints("two") == drills.checkpoints(alone)
    evaluations = [json.loads((run / "eval.json").read_text()) for run in (drills.folder / "two", alone)]
    assert evaluations[0] == evaluations[1]


@pytest.mark.long
def test_a_batch_that_does_not_fit_one_rank_is_halved_on_all_of_them(drills: Drills) -> None:
    """Memory runs out in the pass of the policy and in that of its reference; the ranks stay in step."""
    recipe = merged(merged(PAIRS, FSDP), {"eval": {"per_device_eval_batch_size": 6, "samples": 0}, **LIVE})
    ranks = start_ranks(drills, drills.recipe("two", **recipe), 2, prepared={0: (("scarce", "evaluation", 8),)})
    assert ranks.ended() == [0, 0], ranks.said
    assert "out of memory in evaluation with 6 rows at a time: going on with 3" in ranks.said
    alone = drills.whole(**merged(recipe, TWICE))
    require_close_run(drills, "two", alone)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")


def stopped_on_second(drills: Drills, recipe: str, count: int, call: int) -> Ranks:
    """Ranks that a signal to the second of them stops in its ``call``-th micro-batch."""
    ranks = start_ranks(drills, recipe, count, prepared={1: (("pause", LOSS, call),)})
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75] * count, ranks.said
    return ranks


@pytest.mark.long
def test_all_weights_and_their_reference_are_sharded_also_when_stopped(drills: Drills) -> None:
    recipe = merged(merged(PAIRS, FSDP), merged(FULL, LIVE))
    alone = drills.whole(**merged(recipe, TWICE))
    written = drills.recipe("two", **recipe)
    ranks = stopped_on_second(drills, written, 2, 3)
    assert "reference: a second copy of the model as it starts" in ranks.said
    assert "weights: sharded over 2 processes" in ranks.said
    run_ranks(drills, written, 2)
    require_close_run(drills, "two", alone)


SHARED: dict[str, Any] = {"launch": {"engine": "ddp", "context_parallel_size": 2}}


@pytest.mark.long
@pytest.mark.parametrize("layout", telling({"padded": {}, "unpadded": {"data": {"padding_free": True}}}, "unpadded"))
def test_two_ranks_that_share_rows_are_one_process_also_when_stopped(layout: dict[str, Any], drills: Drills) -> None:
    recipe = merged(merged(PAIRS, layout), LIVE)
    alone, written = drills.whole(**recipe), drills.recipe("two", **merged(recipe, SHARED))
    ranks = stopped_on_second(drills, written, 2, 3)
    assert "each row on 2 processes" in ranks.said
    run_ranks(drills, written, 2)
    require_close_run(drills, "two", alone)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "launch", "count"),
    [
        pytest.param(
            {"quantization": {"method": "nf4"}},
            {"context_parallel_size": 2},
            2,
            id="adapters, rows shared",
            marks=pytest.mark.long,
        ),
        pytest.param(FULL, {"context_parallel_size": 2}, 2, id="all weights, rows shared", marks=pytest.mark.long),
        pytest.param(FULL, {"dp_replicate_size": 2}, 4, id="all weights, replicas"),
    ],
)
def test_four_ranks_with_shards_are_one_process(
    change: dict[str, Any], launch: dict[str, Any], count: int, drills: Drills
) -> None:
    recipe = merged(merged(PAIRS, change), {"train": {"max_steps": 3}, "eval": {"samples": 0}, **LIVE})
    run_ranks(drills, drills.recipe("four", **merged(recipe, {"launch": {"engine": "fsdp", **launch}})), 4)
    require_close_run(drills, "four", drills.whole(**merged(recipe, {"train": {"gradient_accumulation_steps": count}})))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"launch": {"engine": "fsdp"}, "lora": {"init_lora_weights": "pissa"}}, "FT518"),
        ({"launch": {"engine": "fsdp"}, "lora": {"use_dora": True}}, "FT518"),
        ({"launch": {"context_parallel_size": 2}, "model": {"kernels": "off"}}, "FT345"),
    ],
    ids=["PiSSA", "DoRA", "rows of layers off the kernels"],
)
def test_what_cannot_be_sharded_is_refused_before_anything_is_built(
    change: dict[str, Any], code: str, drills: Drills
) -> None:
    ranks = start_ranks(drills, drills.recipe("r", **merged(PAIRS, change)), 2)
    assert ranks.ended()[0] == 3, ranks.said
    assert f"error[{code}]" in ranks.said
    assert "help: " in ranks.said
