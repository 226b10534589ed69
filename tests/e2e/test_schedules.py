"""Each schedule gives the rates that transformers gives, also in a run that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

from ftcli.tables import schedules
from tests.e2e.conftest import User

#: For each schedule that needs no evaluations: the recipe's arguments, and transformers' own.
ARGUMENTS: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "linear": [({}, {})],
    "cosine": [({}, {}), ({"num_cycles": 1.5}, {"num_cycles": 1.5})],
    "cosine_with_restarts": [({"num_cycles": 3}, {"num_cycles": 3})],
    "cosine_with_min_lr": [({"min_lr": 1e-4}, {"min_lr": 1e-4}), ({"min_lr_rate": 0.25}, {"min_lr_rate": 0.25})],
    "cosine_warmup_with_min_lr": [
        ({"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2})
    ],
    "polynomial": [({}, {}), ({"lr_end": 1e-5, "power": 2}, {"lr_end": 1e-5, "power": 2})],
    "warmup_stable_decay": [
        ({"num_decay_steps": 3}, {"num_decay_steps": 3}),
        ({"num_decay_steps": 0.3, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
         {"num_decay_steps": 3, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}),
        ({"num_decay_steps": 2, "num_stable_steps": 3}, {"num_decay_steps": 2, "num_stable_steps": 3}),
    ],
    "inverse_sqrt": [({}, {}), ({"timescale": 4}, {"timescale": 4})],
    "constant": [({}, {})],
    "constant_with_warmup": [({}, {})],
}  # fmt: skip
#: `make test` takes the last of each, which sets most.
CASES = [
    pytest.param(name, *case, marks=() if case is cases[-1] else pytest.mark.long)
    for name, cases in ARGUMENTS.items()
    for case in cases
]


#: No rate depends on what is trained: a run on few modules is set up, and does its steps, sooner.
FEW: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def test_every_schedule_of_transformers_has_a_row() -> None:
    assert set(schedules.names()) == {kind.value for kind in SchedulerType}
    evaluating = {name for name in schedules.names() if schedules.row(name).by_evaluations}
    assert set(schedules.names()) - evaluating == set(ARGUMENTS)


@pytest.mark.filterwarnings("ignore:Both num_training_steps")
@pytest.mark.parametrize(("name", "ours", "theirs"), CASES)
def test_a_run_has_the_rates_that_transformers_gives(
    name: str, ours: dict[str, Any], theirs: dict[str, Any], user: User
) -> None:
    warm_up = 0 if name == "constant" else 2
    train = {"lr_scheduler_type": name, "lr_scheduler_kwargs": ours, "warmup_steps": warm_up, "max_steps": 9}
    rows = [{"path": "bundled:smoke-train", "max_rows": 9}]
    change = {"train": {**train, "per_device_train_batch_size": 1}, "data": {"train": rows, "eval": []}}
    user.done("train", user.recipe("r", lora=FEW, **change))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    oracle = get_scheduler(name, optimizer, warm_up, 9, theirs)
    wanted = []
    for _ in range(9):
        wanted.append(oracle.get_last_lr()[0])
        optimizer.step()
        oracle.step()
    assert [line["learning_rate"] for line in user.metrics("r") if "loss" in line] == wanted


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("warmup_stable_decay", {"num_decay_steps": 0.5}),
        pytest.param("cosine_with_min_lr", {"min_lr_rate": 0.1}, marks=pytest.mark.long),
        ("reduce_lr_on_plateau", {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"}),
        pytest.param("greedy", {"patience": 0, "min_lr": 1e-5, "max_lr": 1e-2}, marks=pytest.mark.long),
    ],
)
def test_a_run_that_goes_on_has_the_same_rates(name: str, arguments: dict[str, Any], user: User) -> None:
    train = {"lr_scheduler_type": name, "lr_scheduler_kwargs": arguments, "max_steps": 8}
    held_out: dict[str, Any] = {"data": {"eval": []}}
    if schedules.row(name).by_evaluations:
        held_out = {"eval": {"every_steps": 1, "samples": 0}}
    recipe = user.recipe("r", lora=FEW, train=train, checkpoint={"every_steps": 3}, **held_out)
    user.done("train", recipe)
    rates = [line["learning_rate"] for line in user.metrics("r") if "loss" in line]
    assert len(set(rates)) > 2
    user.goes_on_alike("r", recipe)


def test_the_rate_falls_when_evaluations_get_no_better(user: User) -> None:
    arguments = {"patience": 1, "factor": 0.1, "threshold": 100.0, "threshold_mode": "abs"}  # nothing is better
    train = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": arguments, "max_steps": 6}
    user.done("train", user.recipe("r", lora=FEW, train=train, eval={"every_steps": 1, "samples": 0}))
    rates = [line["learning_rate"] for line in user.metrics("r") if "loss" in line]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, 1e-4, 1e-4, 1e-5])


@pytest.mark.parametrize(("warm_up", "told"), [(2, ["warning"]), (1, [])])
def test_a_warm_up_as_long_as_training_is_told_where_its_length_follows_from_the_data(
    user: User, warm_up: int, told: list[str]
) -> None:
    data = {"train": [{"path": "bundled:smoke-train", "max_rows": 8}], "eval": []}
    train = {"max_steps": None, "num_train_epochs": 1, "warmup_steps": warm_up}
    status, document = user.run("train", user.recipe("r", lora=FEW, data=data, train=train))
    assert status == 0
    found = [finding for finding in document["findings"] if finding["code"] == "FT268"]
    assert [finding["severity"] for finding in found] == told
    assert all("2 is not less than the 2 steps of this run" in finding["message"] for finding in found)
