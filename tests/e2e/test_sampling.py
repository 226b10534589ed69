"""`train.train_sampling_strategy: group_by_length`: each row once an epoch, less padding, the same order every time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_pt_utils import LengthGroupedSampler

from ftcli.data.order import by_length
from tests.e2e.conftest import User

LENGTHS = np.random.default_rng(0).lognormal(5.0, 0.8, 1003).astype(np.int64) + 1


@pytest.fixture
def user(narrow: User) -> User:
    """What is asked here does not depend on what the model knows."""
    return narrow


def padding(order: list[int], batch: int) -> int:
    batches = [LENGTHS[order[i : i + batch]] for i in range(0, len(order), batch)]
    return sum(int(b.max()) * len(b) - int(b.sum()) for b in batches)


@pytest.mark.parametrize("batch", [2, 8, 64])
def test_each_row_comes_once_and_less_is_padded(batch: int) -> None:
    shuffled = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1)).tolist()
    found = by_length(shuffled, LENGTHS, batch, torch.Generator().manual_seed(2))
    assert sorted(found) == list(range(len(LENGTHS)))
    assert found == by_length(shuffled, LENGTHS, batch, torch.Generator().manual_seed(2))
    assert found != by_length(shuffled, LENGTHS, batch, torch.Generator().manual_seed(3))
    assert LENGTHS[found[:batch]].max() == LENGTHS.max()
    theirs = list(LengthGroupedSampler(batch, lengths=LENGTHS.tolist(), generator=torch.Generator().manual_seed(1)))
    assert padding(found, batch) < 1.1 * padding(theirs, batch) < padding(shuffled, batch)


def test_batches_of_all_lengths_alternate() -> None:
    found = by_length(list(range(len(LENGTHS))), LENGTHS, 8, torch.Generator().manual_seed(2))
    means = [LENGTHS[found[i : i + 8]].mean() for i in range(0, 400, 8)]
    rising = sum(b > a for a, b in itertools.pairwise(means))
    assert 15 < rising < 35  # sorted spans would give 49 or none


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 9])
def test_few_rows(rows: int) -> None:
    assert sorted(by_length(range(rows), LENGTHS, 4, torch.Generator().manual_seed(0))) == list(range(rows))


def test_a_run_pads_less_and_goes_on_alike(user: User) -> None:
    def epoch(name: str, **train: Any) -> dict[str, Any]:
        change: dict[str, Any] = {"train": {"max_steps": 1, **train}, "checkpoint": {"every_steps": 4}}
        recipe = user.recipe(name, **change)
        user.done("train", recipe)
        if train:
            user.goes_on_alike(name, recipe)
        told: dict[str, Any] = json.loads((user.folder / name / "tokens.json").read_text())["epoch"]
        return told

    plain, grouped = epoch("plain"), epoch("grouped", train_sampling_strategy="group_by_length", max_steps=13)
    assert grouped["tokens"] == plain["tokens"]
    assert grouped["tokens_padded"] < 0.8 * plain["tokens_padded"]
    seen = [line["tokens"] for line in user.metrics("grouped") if "loss" in line]
    assert seen[9] == grouped["tokens"]  # ten batches of four are an epoch of the forty rows


def test_where_nothing_is_padded_it_has_no_effect_and_grpo_refuses_it(user: User) -> None:
    train = {"train_sampling_strategy": "group_by_length", "per_device_train_batch_size": 1}
    status, document = user.run("check", user.recipe("r", train=train))
    assert status == 0
    assert [f["code"] for f in document["findings"] if "group_by_length" in f["message"]] == ["FT259"]
    grpo = {"rewards": [{"use": "contains"}], "num_generations": 4}
    status, document = user.run("grpo", user.recipe("g", train=train, grpo=grpo))
    assert status == 2
    said = [f["message"] for f in document["findings"] if f["code"] == "FT250"]
    assert any("train.train_sampling_strategy: group_by_length is not supported by GRPO" in message for message in said)
