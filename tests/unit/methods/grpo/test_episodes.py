"""Rollouts of several turns: who is asked when, what ends them, and what the model is told."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ftcli.data.tool_talk import Turn
from ftcli.judges.environment import EnvironmentFacts, ToolResult
from ftcli.judges.verdicts import FailedJudgement
from ftcli.methods.grpo.draws import Acting, Episode, Episodes, verdict_as_json, verdict_of_json
from ftcli.methods.grpo.settings import EnvironmentConfig

CALL, BROKEN = 100, 101


class FakeTalk:
    """A turn with the token CALL calls a tool; an answer is as many tokens as it has letters."""

    def __init__(self) -> None:
        self.turns: list[tuple[list[int], list[int]]] = []

    def turn(self, tokens: Sequence[int], before: Sequence[int]) -> Turn:
        self.turns.append((list(tokens), list(before)))
        calls = tuple(("tool", {"at": at}) for at, token in enumerate(tokens) if token == CALL)
        return Turn(calls, ("bad",) if BROKEN in tokens else ())

    def answers(self, said: Sequence[tuple[str, str]]) -> list[int]:
        return [7] * sum(len(text) for _, text in said)


class FakeInstance:
    def __init__(self, answer: str = "abc") -> None:
        self.called: list[Any] = []
        self.rewarded = 0
        self.tool_seconds = 0.0
        self._answer = answer

    def call(self, calls: Sequence[Any], most: int | None) -> list[ToolResult]:
        self.called.append(list(calls))
        return [ToolResult(name, self._answer, failed=False) for name, _ in calls]

    def reward(self) -> float:
        self.rewarded += 1
        return 2.5


class FakePool:
    facts = EnvironmentFacts("Fake", (), rewards=True)

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4)

    def submit(self, work: Any, *given: Any) -> Any:
        return self._threads.submit(work, *given)


def made(
    count: int = 1, longest: int = 30, lockstep: bool = True, **settings: Any
) -> tuple[Episodes, list[Episode], Any]:
    config = EnvironmentConfig(file="a.py:B", **settings)
    talk: Any = FakeTalk()
    pool: Any = FakePool()
    instances: list[Any] = [FakeInstance() for _ in range(count)]
    rollouts = [Episode(one, [1, 2]) for one in instances]
    places = {(0, at): at for at in range(count)}
    return Episodes(Acting(pool, talk, config, lockstep), rollouts, longest, places), rollouts, talk


def test_a_call_is_answered_and_the_next_turn_is_read_alone() -> None:
    turns, (one,), talk = made()
    assert turns.ended(0, 0, [5, CALL, 4], "stop")
    assert turns.given(wait=True) == [(0, 0, [7, 7, 7])]
    assert one.turn == 6
    assert not turns.ended(0, 0, [5, CALL, 4, 7, 7, 7, 8, 4], "stop")
    assert talk.turns == [([5, CALL, 4], [1, 2]), ([8, 4], [1, 2, 5, CALL, 4, 7, 7, 7])]
    assert one.end is not None
    assert one.end.result() == (2.5, {})
    assert (one.rounds, one.calls, one.failures) == (1, 1, 0)


@pytest.mark.parametrize(
    ("tokens", "reason", "settings"),
    [([5, 4], "stop", {}), ([CALL, 5], "limit", {}), ([CALL, 4], "stop", {"max_tool_calling_iterations": 1})],
)
def test_what_ends_a_rollout(tokens: list[int], reason: Any, settings: dict[str, Any]) -> None:
    turns, (one,), _ = made(**settings)
    if settings:
        assert turns.ended(0, 0, [CALL, 4], "stop")
        turns.given(wait=True)
    assert not turns.ended(0, 0, tokens, reason)
    assert one.end is not None, "it is scored when it ends"


def test_an_answer_without_room_for_another_turn_ends_it_as_it_stands() -> None:
    turns, (one,), _ = made(longest=6)
    assert turns.ended(0, 0, [5, CALL, 4], "stop")
    assert turns.given(wait=True) == [(0, 0, None)]
    assert one.turn == 0
    assert one.end is not None


def test_an_answer_that_cannot_fit_is_not_even_tokenized() -> None:
    turns, (one,), talk = made(longest=6)
    instance: Any = one.instance
    instance._answer = "x" * 10_000
    talk.answers = None
    assert turns.ended(0, 0, [5, CALL, 4], "stop")
    assert turns.given(wait=True) == [(0, 0, None)]
    assert one.end is not None


def test_a_broken_call_is_told_and_counted() -> None:
    turns, (one,), _ = made(longest=99)
    assert turns.ended(0, 0, [BROKEN, 4], "stop")
    ((_, _, tokens),) = turns.given(wait=True)
    assert tokens is not None
    assert len(tokens) == len(str({"error": "not a call: bad"}))
    assert (one.calls, one.failures) == (1, 1)


def test_in_lockstep_all_are_waited_for_and_told_in_order() -> None:
    turns, _, _ = made(3)
    for at in (2, 0, 1):
        assert turns.ended(0, at, [CALL, 4], "stop")
    assert turns.given(wait=False) == []
    assert [at for _, at, _ in turns.given(wait=True)] == [0, 1, 2]


def test_otherwise_whoever_is_there_goes_on() -> None:
    turns, _, _ = made(3, lockstep=False)
    for at in range(3):
        assert turns.ended(0, at, [CALL, 4], "stop")
    found: list[int] = []
    while len(found) < 3:
        found += [at for _, at, _ in turns.given(wait=True)]
    assert sorted(found) == [0, 1, 2]
    assert turns.given(wait=False) == []


def test_verdicts_travel() -> None:
    for verdict in (1.5, None, FailedJudgement("why")):
        assert verdict_of_json(verdict_as_json(verdict)) == verdict
