"""The time of a step's parts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ftcli.methods.grpo import spans as module
from ftcli.methods.grpo.spans import Spans

CPU = torch.device("cpu")


def test_time_belongs_to_the_part_that_was_entered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    spans = Spans(CPU, ["rollout", "training", "never"], ["training", "rollout"])
    spans.begin_step(1)
    now[0] += 3.0  # before any part
    for part, seconds in (("rollout", 2.0), ("training", 4.0), (None, 3.0), ("training", 1.0), (None, 0.0)):
        spans.enter(part)
        now[0] += seconds
    spans.count("training", 5)
    spans.count("training", 6)
    (found,) = spans.take()
    assert found["seconds/rollout"] == 2.0
    assert found["seconds/training"] == 5.0
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
