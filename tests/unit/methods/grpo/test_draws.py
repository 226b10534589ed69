"""Groups without spread make way for completions of other prompts, a number of times that is bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.generation.requests import Completion
from ftcli.judges import Judge
from ftcli.methods.grpo.draws import OVERLONG, Draws
from ftcli.methods.grpo.rewards import Reward, RewardFailures
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.grpo.spans import REWARDS, ROLLOUT, Spans
from ftcli.reporting import SilentReporter
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Row

PROMPTS = 12


class FakeRollouts:
    """Says the prompt and which draw of its step it is."""

    def __init__(self) -> None:
        self.stopping = SimpleNamespace(stopped=lambda tokens: tokens[-1] == 1)
        self.asked: list[list[int]] = []

    def complete(
        self, prompts: list[list[int]], step: int, own: slice, turns: None, shown: list[None]
    ) -> list[Completion]:
        self.asked.append([ids[0] for ids in prompts[own]])
        return [Completion([ids[0], at, 1], [-0.1] * 3, "stop") for at, ids in enumerate(prompts[own])]


def made(teaching: set[int], **settings: Any) -> tuple[Draws, FakeRollouts]:
    """Completions of the prompts in ``teaching`` differ in reward, all others have 0.5."""

    def score(batch: Any) -> list[float | None]:
        found: list[float | None] = []
        for text in batch.completions:
            prompt, place, _ = map(int, text.split())
            found.append(place % 2 if prompt in teaching else 0.5)
        return found

    job: Any = SimpleNamespace(
        recipe=SimpleNamespace(run=SimpleNamespace(seed=7)),
        tokenizer=lambda text, add_special_tokens: {"input_ids": [[int(one)] for one in text]},
        reasoning_marks=SimpleNamespace(
            split=lambda tokens, text, templated: Answer(" ".join(str(token) for token in tokens))
        ),
    )
    grpo = GrpoConfig(num_generations=4, max_completion_length=4, **settings)
    asked = [RenderedPrompt(Prompt(Row("d", at + 1, {}), None, str(at), None), str(at)) for at in range(PROMPTS)]
    rewards = [Reward("r", 1.0, Judge("r", "reward", "skip", score))]
    spans = Spans(torch.device("cpu"), (ROLLOUT, REWARDS), (ROLLOUT,))
    rollouts: Any = FakeRollouts()
    return Draws(job, grpo, asked, {}, rewards, RewardFailures(1.0, SilentReporter()), rollouts, spans, None), rollouts


def test_groups_are_drawn_again_until_all_teach_or_the_rounds_are_over() -> None:
    draws, rollouts = made({1, 4, 5, 6}, max_resample_times=20)
    drawn, again = draws.with_spread([0, 1, 2], step=3, rollout=3)
    rows = [one.row for one in drawn.completions]
    assert set(rows) <= {1, 4, 5, 6}
    assert rows[4:8] == [1] * 4, "what teaches stays in its place"
    assert [one.tokens[0] for one in drawn.completions] == rows
    assert [one.text for one in drawn.completions] == [str(row) for row in rows]
    assert drawn.rewards[:, 0].tolist() == [0.0, 1.0, 0.0, 1.0] * 3
    rounds = [sorted(set(asked)) for asked in rollouts.asked]
    assert again == sum(map(len, rounds[1:]))
    assert not any(set(first) & set(second) for first in rounds for second in rounds if first is not second)
    assert draws.take_tokens() == sum(len(asked) for asked in rollouts.asked) * 4
    assert draws.take_tokens() == 0
    same, _ = made({1, 4, 5, 6}, max_resample_times=20)[0].with_spread([0, 1, 2], step=3, rollout=3)
    other, _ = made({1, 4, 5, 6}, max_resample_times=20)[0].with_spread([0, 1, 2], step=4, rollout=4)
    assert same.completions == drawn.completions
    assert other.completions != drawn.completions


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_the_rounds_are_bounded(rounds: int) -> None:
    draws, rollouts = made(set(), max_resample_times=rounds)
    drawn, again = draws.with_spread([0, 1, 2], step=0, rollout=0)
    assert len(rollouts.asked) == 1 + rounds
    assert again == 3 * rounds
    assert len(drawn.completions) == 12
    assert len(draws.take_noted()) == 1 + rounds


def test_where_no_other_prompt_is_left_the_same_one_is_completed_again() -> None:
    draws, rollouts = made(set(), max_resample_times=2)
    drawn, _ = draws.with_spread(list(range(PROMPTS)), step=0, rollout=0)
    assert [sorted(set(asked)) for asked in rollouts.asked] == [list(range(PROMPTS))] * 3
    assert sorted({one.row for one in drawn.completions}) == list(range(PROMPTS))


def test_the_penalty_is_a_reward_of_its_own() -> None:
    draws, _ = made({0, 1, 2}, overlong_buffer=2, overlong_penalty=0.5)
    assert draws.names == ["r", OVERLONG]
    assert draws.weights.tolist() == [1.0, 0.5]
    drawn = draws.draw([0, 1], step=0)
    assert drawn.rewards[:, 1].tolist() == [-0.5] * 8
