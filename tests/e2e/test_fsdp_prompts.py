"""Methods on prompts with weights that are sharded over ranks (``launch.engine: fsdp``): the run of one process."""

from __future__ import annotations

import signal
import string
from typing import Any

import pytest

from tests.e2e.conftest import merged
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.e2e.test_fsdp import FULL, require_close
from tests.e2e.test_ranks_distill import CHANGE as DISTILL
from tests.e2e.test_ranks_grpo import AGENT, CHANGE, STEP, twice
from tests.tiers import telling

FSDP: dict[str, Any] = {"model": {"kernels": "reference"}, "launch": {"engine": "fsdp"}}
NF4: dict[str, Any] = {"quantization": {"method": "nf4"}}
#: One of two ranks has no room for all weights, so that both gather layers for each token.
BY_LAYER: dict[int, Any] = {1: (("no_room_for_all",),)}
#: Completions of 1 to 12 tokens, of a group for each rank; groups are drawn again on one of them and not on the other.
UNEVEN: dict[str, Any] = {
    "train": {"max_steps": 6, "per_device_train_batch_size": 4},
    "grpo": {
        "num_generations": 4,
        "max_completion_length": 12,
        "stop_strings": [*string.ascii_letters, " ", "."],
        "max_resample_times": 3,
        "rewards": [{"use": "regex", "pattern": "[0-9]"}],
    },
}


def run_to_the_end(drills: Drills, change: dict[str, Any], command: str, prepared: dict[int, Any] | None) -> None:
    """Runs two ranks, which say how weights are gathered."""
    ranks = start_ranks(drills, drills.recipe("two", **change), 2, command=command, prepared=prepared)
    assert ranks.ended() == [0, 0], ranks.said
    how = "weights gathered layer by layer for each token" if prepared else "all weights gathered once a step"
    assert ranks.said.count(f"generation: the engine, {how}") == 1


def require_same(drills: Drills, alone: Any, change: dict[str, Any]) -> None:
    """Of frozen bases to the last bit; of weights that are trained the last digits differ."""
    if change.get("lora", True) is not None:
        assert drills.metrics("two") == drills.metrics(alone)
        require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
        return
    rounded = change["model"].get("dtype") == "bfloat16"
    for line, wanted in zip(drills.metrics("two"), drills.metrics(alone), strict=True):
        assert line.get("tokens") == wanted.get("tokens")
        for key in ("loss", "grad_norm", "kl", "entropy"):
            assert line.get(key, 0) == pytest.approx(wanted.get(key, 0), rel=1e-2 if rounded else 1e-4, abs=1e-6), key
    if not rounded:
        require_close(drills.folder / "two" / "model", alone / "model")


@pytest.mark.parametrize(
    ("change", "prepared"),
    telling(
        {
            "uneven lengths by layer, nf4": (merged(NF4, UNEVEN), BY_LAYER),
            "full with a reference and a teacher": (
                merged(FULL, {"grpo": {"teacher": "bundled:tiny-gemma2", "teacher_coef": 0.1}}),
                None,
            ),
            # Micro-batches without an advantage: their passes are made for the other rank's sake.
            "nothing to learn on a rank": (
                merged(UNEVEN, {"grpo": {"beta": 0.0, "max_resample_times": 0, "num_iterations": 1}}),
                None,
            ),
        },
        "uneven lengths by layer, nf4",
    ),
)
def test_two_ranks_are_one_process_that_accumulates_twice(
    change: dict[str, Any], prepared: dict[int, Any] | None, drills: Drills
) -> None:
    change = merged(merged(CHANGE, FSDP), change)
    alone = drills.whole("grpo", **twice(change))
    run_to_the_end(drills, change, "grpo", prepared)
    require_same(drills, alone, change)
    lines = [line for line in drills.metrics("two") if "reward_std" in line]
    assert any(line["reward_std"] > 0 for line in lines)
    if prepared:
        assert {line["completions/min_length"] for line in lines} == {1.0}
        assert any(line["groups_drawn_again"] % 2 for line in lines)


@pytest.mark.long
def test_rollouts_with_tools_by_layer(drills: Drills) -> None:
    change = merged(merged(AGENT, FSDP), {"train": {"max_steps": 1}})
    run_to_the_end(drills, change, "grpo", BY_LAYER)
    require_same(drills, drills.whole("grpo", **twice(change)), change)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "prepared"),
    [
        pytest.param(
            merged(FULL, {"model": {"dtype": "bfloat16"}, "distill": {"teacher_quantization": "nf4"}}),
            None,
            id="full, nf4 teacher",
        ),
        pytest.param(
            merged(NF4, {"distill": {"teacher": None, "teacher_column": "answer"}}), BY_LAYER, id="nf4, its own base"
        ),
    ],
)
def test_distillation(change: dict[str, Any], prepared: dict[int, Any] | None, drills: Drills) -> None:
    change = merged(merged(DISTILL, FSDP), change)
    alone = drills.whole("train", **twice(change))
    run_to_the_end(drills, change, "train", prepared)
    require_same(drills, alone, change)


@pytest.mark.long
def test_a_run_that_is_stopped_between_two_passes_goes_on_as_it_was(drills: Drills) -> None:
    change = merged(CHANGE, FSDP)
    whole, recipe = drills.whole("grpo", **twice(change)), drills.recipe("two", **change)
    ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", STEP, 3),)}, command="grpo")
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGTERM)
    ranks.drills[1].release()
    assert ranks.ended() == [75, 75], ranks.said
    run_ranks(drills, recipe, 2, command="grpo")
    require_same(drills, whole, change)


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_samples_is_named(drills: Drills) -> None:
    """The other one waits for it within a pass, and has the finished steps."""
    prepared = {0: BY_LAYER[1], 1: (("pause", "ftcli.generation.decoding:Stepper.step", 7),)}
    ranks = start_ranks(drills, drills.recipe("r", **merged(CHANGE, FSDP)), 2, prepared=prepared, command="grpo")
    ranks.drills[1].until_reached()
    ranks.drills[1].signal(signal.SIGKILL)
    assert ranks.drills[1].wait() == -9
    (ranks.folder / "lost-1").write_text("was killed by SIGKILL")
    assert ranks.drills[0].wait() == 75, ranks.said
    assert "rank 1 was killed by SIGKILL" in ranks.said
    assert drills.checkpoints("r") == ["step-00000001", "step-00000002"]
