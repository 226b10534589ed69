"""`ftcli bench` on rows of one length and of many."""

from __future__ import annotations

from typing import Any

import pytest

from ftcli.pipeline.benchmark import lengths_of
from ftcli.plan.batches import Layout
from tests.e2e.conftest import User

WORDS = ("--batch", "4", "--seq", "60", "--steps", "3")


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


@pytest.mark.parametrize(("free", "layout"), [("auto", "padded"), ("true", "unpadded")])
def test_a_mix_of_lengths_is_laid_out_as_in_training_and_counted(user: User, free: str, layout: Layout) -> None:
    words = (*WORDS, "--lengths", "lognormal:20,0.8", "--set", f"data.padding_free={free}")
    found = user.done("bench", user.recipe(), *words)
    assert (found["layout"], found["lengths"], found["steps"]) == (layout, "lognormal:20,0.8", 3)
    sizes = lengths_of("lognormal:20,0.8")(16, 60, 3)
    assert found["real_tokens"] < sum(sizes)
    assert found["filler_share"] == pytest.approx(1 - found["real_tokens"] / found["computed_tokens"])
    ratio = found["real_tokens"] / found["computed_tokens"]
    assert found["tokens_per_second"] == pytest.approx(found["computed_tokens_per_second"] * ratio)
    assert 3 * found["step_ms_min"] / 1000 * found["tokens_per_second"] <= found["real_tokens"] * 1.001
    assert 3 * found["step_ms_max"] / 1000 * found["tokens_per_second"] >= found["real_tokens"] * 0.999


def test_training_computes_what_it_says(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes that the trainer's steps have are those that the numbers are made from."""
    from ftcli.methods.sft.train import SftObjective
    from ftcli.train.parallel import MicroBatch

    seen: list[tuple[int, int]] = []
    make = SftObjective.micro_batches

    def noted(objective: SftObjective, step: int, monitor: Any) -> list[MicroBatch]:
        made = make(objective, step, monitor)
        seen.extend((batch.counts.real, batch.inputs["input_ids"].numel()) for batch in made)
        return made

    monkeypatch.setattr(SftObjective, "micro_batches", noted)
    for free in ("false", "true"):
        seen.clear()
        words = (*WORDS, "--lengths", "lognormal:20,0.8", "--set", f"data.padding_free={free}")
        found = user.done("bench", user.recipe(), *words)
        assert len(seen) == 4  # the first one is not timed
        assert found["real_tokens"] == sum(real for real, _ in seen[1:])
        assert found["computed_tokens"] == sum(computed for _, computed in seen[1:])


def test_rows_of_one_length_have_no_filler_but_what_rounds_them_up(user: User) -> None:
    found = user.done("bench", user.recipe(), *WORDS)
    assert (found["lengths"], found["filler_share"], found["shapes"]) == (None, 0.0, 1)
    assert found["real_tokens"] == found["computed_tokens"] == 3 * 4 * 60
    assert found["tokens_per_second"] == pytest.approx(4 * 60 / found["step_ms"] * 1000)
    rounded = user.done("bench", user.recipe(), *WORDS, "--set", "data.padding_free=true")
    assert rounded["computed_tokens"] == 3 * 256
    first = user.done("bench", user.recipe(), "--steps", "0", "--lengths", "lognormal:20,0.8")
    assert first["first_step_only"]
    assert first["shapes"] == 1


def test_steps_on_pairs_are_timed_with_their_reference(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in each step, or once before: the same pairs, one pass less in each step, and nothing is kept."""
    from ftcli.methods.preference.objective import PairObjective

    live: list[bool] = []
    own = PairObjective._of_reference

    def noted(objective: PairObjective, inputs: Any, known: Any = None) -> Any:
        live.append(known is None)
        return own(objective, inputs, known)

    monkeypatch.setattr(PairObjective, "_of_reference", noted)
    recipe = user.recipe(train={"method": "dpo", "per_device_train_batch_size": 2})
    words = ("bench", recipe, "--batch", "2", "--seq", "24", "--prompt", "10", "--steps", "3")
    for cache, computed in (("off", True), (str(user.folder / "kept"), False)):
        live.clear()
        found = user.done(*words, "--set", f"preference.reference_cache={cache}")
        assert live == [computed] * 4  # the first step, and those that are timed
        assert found["real_tokens"] == 3 * 2 * 2 * 24
        assert found["pairs_per_second"] * 2 * 24 == pytest.approx(found["tokens_per_second"])
    assert not (user.folder / "kept").exists()
    assert user.done("bench", user.recipe(), *WORDS)["pairs_per_second"] is None


def test_steps_of_reward_models_are_timed_themselves(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """It timed steps of supervised fine-tuning. There is no head of a language model."""
    from ftcli.methods.reward.train import RewardObjective

    taken: list[int] = []
    own = RewardObjective.loss

    def noted(objective: RewardObjective, inputs: Any, step: Any) -> Any:
        taken.append(len(inputs["pairs"]))
        return own(objective, inputs, step)

    monkeypatch.setattr(RewardObjective, "loss", noted)
    words = ("--batch", "2", "--seq", "24", "--prompt", "10", "--steps", "3")
    reward = {"center_rewards_coefficient": 0.01}
    recipe = user.recipe(train={"method": "reward", "per_device_train_batch_size": 2}, reward=reward)
    status, document = user.run("bench", recipe, *words)
    assert status == 0
    found = document["result"]
    assert taken == [2] * 4  # the first step, and those that are timed
    assert found["real_tokens"] == 3 * 2 * 2 * 24
    assert found["pairs_per_second"] * 2 * 24 == pytest.approx(found["tokens_per_second"])
    orpo = user.done("bench", user.recipe("o", train={"method": "orpo"}), *words)
    assert found["flops_per_token"] < orpo["flops_per_token"]
