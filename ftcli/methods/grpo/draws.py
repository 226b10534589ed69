"""What a rollout draws: completions of prompts, and what rewards say of them. Each rank has all of them in the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer
from ftcli.generation.requests import cut
from ftcli.job import Job
from ftcli.methods.grpo.advantages import overlong_penalties, without_spread
from ftcli.methods.grpo.rewards import Reward, RewardFailures
from ftcli.methods.grpo.rollouts import Rollouts, gather_completions, gather_json, gather_rows
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.grpo.spans import REWARDS, ROLLOUT, Spans
from ftcli.train.parallel import SEED_STRIDE

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup

#: The reward that `grpo.overlong_buffer` adds.
OVERLONG = "soft_overlong"


@dataclass(frozen=True, slots=True)
class DrawnCompletion:
    """One completion.

    Attributes:
        row: The number of its prompt.
        prompt, text: Its prompt as tokens and as text.
        tokens, known: Its tokens, and their log-probabilities where they are known.
        said: Its text as rewards and people see it.
        ended: It came to an end before its longest.
    """

    row: int
    prompt: list[int]
    text: str
    tokens: list[int]
    known: list[float]
    said: Answer
    ended: bool


@dataclass(frozen=True, slots=True)
class Drawn:
    """Completions, one after the other those of each prompt, and their rewards: (completions, rewards) float32, NaN
    where a reward had no opinion.
    """

    completions: list[DrawnCompletion]
    rewards: Tensor

    def replace(self, places: Sequence[int], others: Drawn) -> None:
        """Puts others in the places of some."""
        for place, one in zip(places, others.completions, strict=True):
            self.completions[place] = one
        self.rewards[torch.tensor(places)] = others.rewards


def share_of(count: int, rank: int, ranks: int) -> slice:
    """Which of so many a rank is to see to."""
    return slice(count * rank // ranks, count * (rank + 1) // ranks)


class Draws:
    """Draws completions and has them judged. All ranks call it alike.

    Attributes:
        names, weights: Of the columns of rewards.
    """

    def __init__(
        self,
        job: Job,
        grpo: GrpoConfig,
        asked: Sequence[RenderedPrompt],
        columns: Mapping[str, Sequence[Any]],
        rewards: Sequence[Reward],
        failures: RewardFailures,
        rollouts: Rollouts,
        spans: Spans,
        group: RankGroup | None,
    ) -> None:
        self._job, self._grpo, self._asked, self._columns = job, grpo, asked, columns
        self._rewards, self.failures, self._rollouts, self._spans = rewards, failures, rollouts, spans
        self._group = group
        self._rank, self._ranks = (0, 1) if group is None else (group.rank, group.size)
        self.names = [reward.name for reward in rewards] + ([OVERLONG] if grpo.overlong_buffer else [])
        weights = [reward.weight for reward in rewards] + ([grpo.overlong_penalty] if grpo.overlong_buffer else [])
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self._tokens = 0
        self._noted: list[tuple[str, float]] = []

    def with_spread(self, prompts: Sequence[int], step: int, rollout: int) -> tuple[Drawn, int]:
        """Completions of ``prompts``, where groups without spread have made way for others as often as the recipe lets
        them; and how many groups were drawn again.

        Which prompts take their place follows from the run's seed, the rollout and the round. Where none is left, the
        same one is completed again.
        """
        each, drawn, again = self._grpo.num_generations, self.draw(prompts, step), 0
        used = set(prompts)
        for turn in range(self._grpo.max_resample_times):
            alike = without_spread(drawn.rewards, self.weights, self._grpo).nonzero().flatten().tolist()
            if not alike:
                break
            generator = torch.Generator()
            generator.manual_seed(((self._job.recipe.run.seed * SEED_STRIDE + rollout) * SEED_STRIDE + turn) % 2**63)
            order = torch.randperm(len(self._asked), generator=generator).tolist()
            others = [row for row in order if row not in used][: len(alike)]
            others += [drawn.completions[group * each].row for group in alike[len(others) :]]
            used.update(others)
            drawn.replace([group * each + at for group in alike for at in range(each)], self.draw(others, step))
            again += len(alike)
        return drawn, again

    def draw(self, prompts: Sequence[int], step: int) -> Drawn:
        """Completions of prompts by their numbers, judged."""
        rows = [row for row in prompts for _ in range(self._grpo.num_generations)]
        texts = [self._asked[row].text for row in rows]
        # The template has written BOS; a tokenizer that adds another would shift every prompt by a token.
        prompt_ids: list[list[int]] = self._job.tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        sampled = self._sample(prompt_ids, step)
        self._tokens += sum(map(len, prompt_ids)) + sum(len(tokens) for tokens, _ in sampled)
        made = [
            DrawnCompletion(
                row, prompt, text, tokens, known, self._answer(row, tokens), self._rollouts.stopping.stopped(tokens)
            )
            for row, prompt, text, (tokens, known) in zip(rows, prompt_ids, texts, sampled, strict=True)
        ]
        return Drawn(made, self._judge(made, step))

    def take_tokens(self) -> int:
        """Tokens of prompts and completions since the last call."""
        found, self._tokens = self._tokens, 0
        return found

    def take_noted(self) -> list[tuple[str, float]]:
        """Metrics of each draw since the last call: the share of completions that a reward failed on, and what judges
        have counted.
        """
        found, self._noted = self._noted, []
        return found

    def _answer(self, row: int, tokens: Sequence[int]) -> Answer:
        """A completion as rewards and people see it: the answer, up to a stop string, beside its reasoning."""
        asked = self._asked[row]
        said = self._job.reasoning_marks.split(tokens, asked.text, templated=asked.templated)
        return replace(said, text=cut(said.text, self._grpo.stop_strings))

    def _sample(self, prompts: list[list[int]], step: int) -> list[tuple[list[int], list[float]]]:
        spans = self._spans
        spans.enter(ROLLOUT)
        own = share_of(len(prompts), self._rank, self._ranks)
        found = gather_completions(self._group, self._rollouts.complete(prompts, step, own))
        spans.enter(None)
        spans.count(ROLLOUT, sum(len(tokens) for tokens, _ in found))
        return found

    def _judge(self, made: Sequence[DrawnCompletion], step: int) -> Tensor:
        """(completions, rewards): each rank judges whole groups."""
        spans, each = self._spans, self._grpo.num_generations
        spans.enter(REWARDS)
        groups = share_of(len(made) // each, self._rank, self._ranks)
        own = made[groups.start * each : groups.stop * each]
        mine = torch.zeros(len(own), len(self._rewards))
        for index, reward in enumerate(self._rewards if own else ()):
            mine[:, index] = torch.tensor([math.nan if value is None else value for value in self._scores(reward, own)])
        rewards = mine if self._group is None else gather_rows(self._group, "rewards", mine)
        spans.enter(None)
        self._count_failures()
        if self._grpo.overlong_buffer:
            lengths = torch.tensor([len(one.tokens) for one in made])
            rewards = torch.cat([rewards, overlong_penalties(lengths, self._grpo)[:, None]], 1)
        if self._grpo.shuffle_rewards:  # the control experiment
            generator = torch.Generator().manual_seed(self._job.recipe.run.seed + step)
            rewards = rewards[torch.randperm(len(rewards), generator=generator)]
        return rewards

    def _scores(self, reward: Reward, made: Sequence[DrawnCompletion]) -> Sequence[float | None]:
        """The reward of each completion; it gets the values of rows as the data has them."""
        lent = {name: [values[one.row] for one in made] for name, values in self._columns.items()}
        asked = [self._asked[one.row].prompt for one in made]
        scores = reward.scores(
            [one.text for one in made],
            [one.said.text for one in made],
            lent,
            [one.row.origin for one in asked],
            [one.said.reasoning for one in made],
            asked,
        )
        self.failures.note(reward, scores)
        return scores.values

    def _count_failures(self) -> None:
        """Adds up over ranks what rewards have failed on. Raises FtcliError FT456 where that is too much."""
        mine = self.failures.newest()
        told: list[Any] = [mine] if self._group is None else gather_json(self._group, "telling", mine)
        for reward in self._rewards:
            noted = [each[reward.name] for each in told if reward.name in each]
            judged, failed = (sum(one[at] for one in noted) for at in (0, 1))
            self._noted.append((f"rewards/{reward.name}/failed", failed / max(judged, 1)))
            for name in noted[0][3] if noted else ():
                self._noted.append((f"rewards/{reward.name}/{name}", sum(one[3][name] for one in noted)))
            self.failures.add(reward.name, judged, failed, next((one[2] for one in noted if one[2]), None))
