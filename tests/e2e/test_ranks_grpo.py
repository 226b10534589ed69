"""GRPO on several ranks is the same run as on one: completions, rewards, weights and numbers."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from ftcli.run.completions import Completions
from tests.e2e.ranks import run_ranks, start_ranks
from tests.e2e.resilience import Drills, require_same_weights
from tests.tiers import telling

STEP = "ftcli.methods.grpo.objective:GrpoObjective.loss"
CHANGE: dict[str, Any] = {
    "data": {
        "train": [{"path": "bundled:smoke-grpo-train", "max_rows": 12}],
        "eval": [{"path": "bundled:smoke-grpo-eval", "max_rows": 4}],
    },
    "train": {"max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    "grpo": {
        "num_generations": 4,
        "max_prompt_length": 48,
        "max_completion_length": 5,
        "temperature": 2.0,
        "beta": 0.05,
        "num_iterations": 2,
        "rewards": [{"use": "regex", "pattern": "[0-4]"}, {"use": "length", "max_chars": 4, "weight": 0.3}],
    },
    "eval": {"every_steps": 2, "tasks": [{"use": "exact_match"}], "generate": {"max_new_tokens": 2}},
    "checkpoint": {"every_steps": 1, "keep_last": 10},
    "logging": {"every_steps": 1},
}


AGENT: dict[str, Any] = {
    "model": {"name_or_path": "bundled:tiny-agent", "dtype": "float32"},
    "data": {"train": [{"path": "bundled:smoke-agent-train", "max_rows": 12}], "eval": [], "max_seq_len": 256},
    "train": {**CHANGE["train"], "max_steps": 2, "per_device_train_batch_size": 4},
    "grpo": {
        "num_generations": 4, "max_prompt_length": 80, "max_completion_length": 140,
        "environment": {"file": "bundled:desk.py:Desk"}, "rewards": [{"use": "exact_match"}],
    },
    "eval": {"tasks": []},
}  # fmt: skip


def twice(change: dict[str, Any]) -> dict[str, Any]:
    return {**change, "train": {**change["train"], "gradient_accumulation_steps": 2}}


@pytest.mark.parametrize(
    "grpo",
    telling(
        {
            "dapo, KL, two passes": {},
            "grpo, one group for both ranks": {
                "loss_type": "grpo",
                "scale_rewards": "batch",
                "num_iterations": 1,
                "beta": 0.0,
                "num_generations": 16,
            },
            "RLOO, groups drawn again": {
                "advantage_estimator": "rloo",
                "max_resample_times": 3,
                "overlong_buffer": 2,
                "entropy_coef": 0.01,
                "rewards": [{"use": "regex", "pattern": "[0-4]"}],
            },
        },
        *("dapo, KL, two passes", "RLOO, groups drawn again"),
    ),
)
def test_two_ranks_are_one_process_that_accumulates_twice(grpo: dict[str, Any], drills: Drills) -> None:
    change = {**CHANGE, "grpo": {**CHANGE["grpo"], **grpo}}
    alone = drills.whole("grpo", **twice(change))
    run_ranks(drills, drills.recipe("two", **change), 2, command="grpo")
    assert drills.metrics("two") == drills.metrics(alone)
    if "max_resample_times" in grpo:  # of four groups, so that the ranks have an odd one now and then
        assert any(line.get("groups_drawn_again", 0) % 2 for line in drills.metrics("two"))
    if "num_iterations" in grpo:  # one pass: no log-probabilities but those of training, and no passes for them
        said = (drills.folder / "two" / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line).get("seconds/log_probs", 0) for line in said} == {0}
    assert any(line.get("reward_std", 0) > 0 and line.get("grad_norm", 0) > 0 for line in drills.metrics("two"))
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    assert drills.checkpoints("two") == drills.checkpoints(alone)
    for step in (1, 3):
        said = [Completions(run / "completions").read(step) for run in (drills.folder / "two", alone)]
        assert said[0] == said[1]
        assert len(said[0]) == 16


def test_rollouts_with_tools_are_the_same_on_two_ranks(drills: Drills) -> None:
    """Each rank has the instances of its own rollouts; their rewards and turns are known on both."""
    alone = drills.whole("grpo", **twice(AGENT))
    run_ranks(drills, drills.recipe("two", **AGENT), 2, command="grpo")
    assert drills.metrics("two") == drills.metrics(alone)
    assert all(line["tools/call_frequency"] == 1.0 for line in drills.metrics("two") if "loss" in line)
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    said = [Completions(run / "completions").read(1) for run in (drills.folder / "two", alone)]
    assert said[0] == said[1]
    assert all("<tool_call>" in one.text for one in said[0])


@pytest.mark.long
def test_completions_for_several_steps_and_early_stops_are_the_same_on_two_ranks(drills: Drills) -> None:
    stops = {"entropy": {"min_entropy": 90.0, "patience": 3}}
    grpo = {**CHANGE["grpo"], "num_iterations": 1, "beta": 0.0, "early_stopping": stops}
    train = {**CHANGE["train"], "max_steps": 6}
    two, one = ({**CHANGE, "train": train, "grpo": {**grpo, "steps_per_generation": count}} for count in (2, 4))
    alone = drills.whole("grpo", **twice(one))
    run_ranks(drills, drills.recipe("two", **two), 2, command="grpo")
    assert drills.metrics("two") == drills.metrics(alone)
    assert drills.metrics("two")[-1]["step"] == 3
    require_same_weights(drills.folder / "two" / "adapter", alone / "adapter")
    for step in (1, 3):
        said = [Completions(run / "completions").read(step) for run in (drills.folder / "two", alone)]
        assert said[0] == said[1]
        assert len(said[0]) == 32


@pytest.mark.long
def test_a_run_that_is_stopped_on_two_ranks_goes_on_as_it_was_also_on_one(drills: Drills) -> None:
    """After the first of two passes over the same completions; only one rank is told."""
    whole = drills.whole("grpo", **twice(CHANGE))
    for name, count in (("two", 2), ("one", 1)):
        recipe = drills.recipe(name, **CHANGE)
        ranks = start_ranks(drills, recipe, 2, prepared={1: (("pause", STEP, 3),)}, command="grpo")
        ranks.drills[1].until_reached()
        ranks.drills[1].signal(signal.SIGTERM)
        ranks.drills[1].release()
        assert ranks.ended() == [75, 75], ranks.said
        if count == 2:
            run_ranks(drills, recipe, 2, command="grpo")
        else:
            drills.run(recipe, command="grpo")
        assert drills.metrics(name) == drills.metrics(whole)
        require_same_weights(drills.folder / name / "adapter", whole / "adapter")


def test_what_fails_on_one_rank_ends_both(drills: Drills) -> None:
    """A reward that fails where two of the three groups are, on rank 1; where it may fail, it is counted over both."""
    (drills.folder / "mine.py").write_text(
        "def score(completions, prompts, answer, **columns):\n"
        "    if len(completions) == 8: raise ValueError('mine')\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    reward: dict[str, Any] = {"file": "mine.py:score"}
    change = {**CHANGE, "train": {**CHANGE["train"], "per_device_train_batch_size": 6}}  # three groups a step
    recipe = drills.recipe("r", **{**change, "grpo": {**CHANGE["grpo"], "rewards": [reward]}})
    ranks = start_ranks(drills, recipe, 2, command="grpo")
    assert ranks.ended()[0] == 4, ranks.said
    assert "FT455" in ranks.said
    assert "rank 1: " in ranks.said, ranks.said
    assert (
        "mine.py:score raised ValueError: mine (mine.py:2), though for none of 8 completions alone, for completion 1 "
        in (ranks.said)
    )
    grpo = {**CHANGE["grpo"], "rewards": [{**reward, "on_error": -1.0}], "reward_failures": {"max_fraction": 1.0}}
    ranks = run_ranks(drills, drills.recipe("skips", **{**change, "grpo": grpo}), 2, command="grpo")
    assert ranks.said.count("FT457") == 1
    failed = [line["rewards/score/failed"] for line in drills.metrics("skips") if "rewards/score/failed" in line]
    assert set(failed) == {8 / 12}  # of three groups rank 1 judges two
