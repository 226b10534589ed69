"""The time of a step's parts."""

from __future__ import annotations

import time

import pytest
import torch

from ftcli.methods.grpo.spans import Spans

CPU = torch.device("cpu")


def test_time_belongs_to_the_part_that_was_entered_last() -> None:
    spans = Spans(CPU, ["rollout", "training", "never"], ["training", "rollout"])
    spans.begin_step(1)
    time.sleep(0.03)  # before any part
    for part, seconds in (("rollout", 0.02), ("training", 0.04), (None, 0.03), ("training", 0.01), (None, 0.0)):
        spans.enter(part)
        time.sleep(seconds)
    spans.count("training", 5)
    spans.count("training", 6)
    (found,) = spans.take()
    assert found["seconds/rollout"] == pytest.approx(0.02, abs=0.012)
    assert found["seconds/training"] == pytest.approx(0.05, abs=0.012)
    assert found["seconds/never"] == 0.0
    assert (found["processed_tokens/training"], found["processed_tokens/rollout"]) == (11.0, 0.0)
    assert spans.take() == []


def test_a_step_that_failed_is_not_counted() -> None:
    spans = Spans(CPU, ["training"], ["training"])
    for number in (1, 2):
        spans.begin_step(number)
        spans.count("training", number)
    spans.begin_step(2)  # tried again
    spans.count("training", 7)
    spans.begin_step(3)
    spans.forget_after(2)
    assert [step["processed_tokens/training"] for step in spans.take()] == [1.0, 7.0]
