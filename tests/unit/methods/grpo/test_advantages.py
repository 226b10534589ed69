"""Advantages from rewards: each estimator is its formula in float64, and TRL's own where TRL has it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

from ftcli.config.model import ModelConfig
from ftcli.methods.grpo.advantages import advantages_of, deviation, overlong_penalties
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.model.tokenizer import load_tokenizer
from tests.small_models import build
from tests.unit.methods.grpo.test_policy import plain_trainer

GROUP = 4
WEIGHTS = [1.0, 0.25]
E = 1e-4
#: Every way to compare: settings, and what it is in float64 of the sums (groups, G), NaN where there is none.
WAYS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo over all": {"scale_rewards": "batch"},
    "grpo as it is": {"scale_rewards": "none"},
    "rloo": {"advantage_estimator": "rloo"},
    "rloo over all": {"advantage_estimator": "rloo", "scale_rewards": "batch"},
    "reinforce": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
}


def settings(**change: Any) -> GrpoConfig:
    return GrpoConfig(num_generations=GROUP, max_completion_length=10, **change)


def rewards() -> torch.Tensor:
    """Four groups: one with spread, one where a reward has no opinion, one that is alike, one with an unscored row."""
    torch.manual_seed(0)
    found = torch.rand(4 * GROUP, 2)
    found[5, 0] = math.nan
    found[8:12] = torch.tensor([0.7, 0.1])
    found[13] = math.nan
    return found


def standard(values: Any) -> Any:
    return (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + E)


def formula(way: str, given: np.ndarray) -> np.ndarray:
    total = np.nansum(given * WEIGHTS, 1)
    total[np.isnan(given).all(1)] = np.nan
    groups = total.reshape(-1, GROUP)
    centred = groups - np.nanmean(groups, 1, keepdims=True)
    others = np.array([[np.nanmean(np.delete(group, at)) for at in range(GROUP)] for group in groups])
    found = {
        "grpo": lambda: centred / (np.nanstd(groups, 1, ddof=1, keepdims=True) + E),
        "grpo over all": lambda: centred / (np.nanstd(groups, ddof=1) + E),
        "grpo as it is": lambda: centred,
        "rloo": lambda: groups - others,
        "rloo over all": lambda: standard(groups - others),
        "reinforce": lambda: standard(groups),
        "reinforce baseline": lambda: standard(centred),
        "gdpo": lambda: standard(_gdpo(given)),
    }[way]()
    return np.nan_to_num(found.reshape(-1), nan=0.0)


def _gdpo(given: np.ndarray) -> np.ndarray:
    groups = given.reshape(-1, GROUP, 2)
    each = (groups - np.nanmean(groups, 1, keepdims=True)) / (np.nanstd(groups, 1, ddof=1, keepdims=True) + E)
    total = np.nansum(each.reshape(-1, 2) * WEIGHTS, 1)
    total[np.isnan(given).all(1)] = np.nan
    return total


@pytest.mark.parametrize("way", list(WAYS))
def test_every_estimator_is_its_formula(way: str) -> None:
    given = rewards()
    found = advantages_of(given, torch.tensor(WEIGHTS), settings(**WAYS[way]))
    np.testing.assert_allclose(found.values.numpy(), formula(way, given.double().numpy()), rtol=2e-5, atol=2e-4)
    assert found.values[13] == 0.0
    assert found.without_spread.tolist() == [False, False, True, False]
    if way != "reinforce":
        assert found.values[8:12].tolist() == [0.0] * 4
    else:  # all completions are compared with each other: what is alike in a group is still better or worse
        assert found.values[8:12].abs().min() > 0.05


@pytest.mark.parametrize("way", list(WAYS))
def test_equal_rewards_teach_exactly_nothing(way: str) -> None:
    """The mean of seven times 0.7 is not 0.7 in float32; what that leaves must not become an advantage."""
    grpo = settings(**WAYS[way]).model_copy(update={"num_generations": 7})
    same = torch.full((7, 1), 0.7)
    assert (same[:, 0] - same[:, 0].mean()).abs().max() > 0.0
    assert advantages_of(same, torch.ones(1), grpo).values.tolist() == [0.0] * 7
    mixed = torch.tensor([[0.0], [1.0], [0.5], [0.5], [0.0], [1.0], [0.25]])
    found = advantages_of(torch.cat([same, mixed]), torch.ones(1), grpo)
    assert found.without_spread.tolist() == [True, False]
    assert found.values[7:].abs().max() > 0.1


def test_one_scored_completion_of_a_group_has_nothing_to_be_compared_with() -> None:
    given = torch.tensor([[1.0], [math.nan], [math.nan], [math.nan], [0.0], [1.0], [1.0], [0.0]])
    for way, change in WAYS.items():
        if way != "reinforce":
            assert advantages_of(given, torch.ones(1), settings(**change)).values[:4].tolist() == [0.0] * 4, way


def trls(trainer: Any, given: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The advantages that a trainer of TRL makes of rewards; all else of its completions is made up."""
    count = len(given)
    texts = [""] * count
    made_up = [[[5, 6]] * count, [[7, 8]] * count, *([None, texts, None, {}, None, []] if rest else [texts])]
    trainer._generate = lambda *_: tuple(made_up)
    trainer._calculate_rewards = lambda *_: given.clone()
    trainer.reward_weights = torch.tensor(WEIGHTS)
    trainer.reward_funcs = trainer.reward_func_names = ["a", "b"]
    trainer.num_generations = GROUP
    advantages: torch.Tensor = trainer._generate_and_score_completions([{"prompt": "a"}] * count)["advantages"]
    return advantages


@pytest.mark.parametrize("way", [name for name in WAYS if name.startswith(("grpo", "gdpo"))])
def test_grpo_and_gdpo_are_trls(way: str, tmp_path: Path) -> None:
    trainer: Any = plain_trainer(build("gemma2").train(), tmp_path)
    for name, value in WAYS[way].items():
        setattr(trainer, name, value)
    wanted = trls(trainer, rewards(), "with tools")
    found = advantages_of(rewards(), torch.tensor(WEIGHTS), settings(**WAYS[way]))
    torch.testing.assert_close(found.values, wanted, rtol=1e-5, atol=5e-4)  # alike: TRL leaves rounding over 1e-4


@pytest.mark.parametrize("way", ["rloo", "rloo over all"])
def test_rloo_is_trls(way: str, tmp_path: Path) -> None:
    args = RLOOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=GROUP, max_completion_length=7,
        report_to="none", use_cpu=True, bf16=False, save_strategy="no", beta=0.0,
        normalize_advantages=way == "rloo over all",
    )  # fmt: skip
    trainer: Any = RLOOTrainer(
        model=build("gemma2").train(), reward_funcs=[lambda completions, **_: [0.0] * len(completions)], args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=load_tokenizer(ModelConfig(name_or_path="bundled:tiny-gemma2"), offline=True),
    )  # fmt: skip
    wanted = trls(trainer, rewards())
    found = advantages_of(rewards(), torch.tensor(WEIGHTS), settings(**WAYS[way]))
    torch.testing.assert_close(found.values, wanted, rtol=1e-5, atol=1e-5)


def test_the_overlong_penalty_is_trls() -> None:
    lengths = list(range(1, 11))
    theirs = get_soft_overlong_punishment(10, 4)
    found = overlong_penalties(torch.tensor(lengths), settings(overlong_buffer=4))
    assert found.tolist() == theirs(completion_ids=[[0] * length for length in lengths])
    assert found.tolist() == [0.0] * 6 + [-0.25, -0.5, -0.75, -1.0]


def test_a_deviation_leaves_out_what_is_no_number() -> None:
    assert math.isnan(deviation(torch.tensor([1.0, math.nan])))
    assert deviation(torch.tensor([1.0, math.nan, 3.0])) == pytest.approx(math.sqrt(2))
