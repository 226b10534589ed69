"""What is said when memory runs out in training: in words, and from the phases of the estimate."""

from __future__ import annotations

from typing import get_args

import pytest

from ftcli.pipeline.shortage import _estimated, _where
from ftcli.preflight.memory.terms import Phase
from ftcli.trainers.base import Doing


@pytest.mark.parametrize(
    ("doing", "said"),
    [
        ("forward", "in the forward pass of step 5 (a batch of 2 rows of 1,024 tokens)"),
        ("backward", "in the backward pass of step 5 (a batch of 2 rows of 1,024 tokens)"),
        ("optimizer step", "in the optimizer step of step 5 (a batch of 2 rows of 1,024 tokens)"),
        ("generation", "in the generation of step 5 (a batch of 2 rows of 1,024 tokens)"),
        ("step", "in step 5 (a batch of 2 rows of 1,024 tokens)"),
        ("evaluation", "in the evaluation after step 4"),
        ("saving", "while step 4 was saved"),
    ],
)
def test_where_it_was(doing: Doing, said: str) -> None:
    assert _where(doing, 4, (2, 1024)) == said


def test_all_that_a_trainer_does_is_a_phase_of_the_estimate_or_has_none() -> None:
    phases, others = (set(get_args(part)) for part in get_args(Doing))
    if "step" in phases:
        phases, others = others, phases
    assert phases == set(get_args(Phase))
    for doing in phases:
        assert doing in _estimated(doing)
    assert {_estimated(doing) for doing in others} == {()}
