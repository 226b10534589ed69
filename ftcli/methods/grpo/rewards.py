"""The recipe's rewards: opened once, the completions that they fail on counted; and when training ends since they rise
no more, or no entropy is left to explore with (`grpo.early_stopping`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ftcli.config.evaluation import RewardConfig
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.judges import (
    NO_ACCESS,
    CompletionBatch,
    Judge,
    JudgeAccess,
    JudgeScores,
    judge_name,
    missing_answer,
    open_judge,
    reserved_column,
)
from ftcli.methods.grpo.settings import GrpoStoppingConfig
from ftcli.plain import JsonObject
from ftcli.reporting import Reporter
from ftcli.rows.prompts import Prompt
from ftcli.tables import judges
from ftcli.train.evaluation import BestEvaluation

#: The share of failures is that among so many completions, the newest ones.
WINDOW = 1000
#: While there are fewer completions, it is as if there were so many: one failure among the first ten is no 10%.
_AT_LEAST = 100


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward of the recipe. ``answer`` is the column with known answers, for judges that compare with one."""

    name: str
    weight: float
    judge: Judge
    answer: str | None = None

    @property
    def becomes(self) -> str:
        """What becomes of a completion that it cannot judge, in words."""
        instead = self.judge.on_error
        return "is left out" if instead == "skip" else f"gets the score {instead}"

    def scores(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        origins: Sequence[Origin] = (),
        reasoning: Sequence[str | None] = (),
        asked: Sequence[Prompt] = (),
    ) -> JudgeScores:
        """One number for each completion, None where the reward has no opinion.

        Args:
            columns: What the rows lend, one value for each completion.
            reasoning: What the model wrote before each completion; None where nothing.

        Raises FtcliError FT455 (exit 4), as :meth:`ftcli.judges.Judge.scores`.
        """
        answers = [""] * len(completions) if self.answer is None else [str(each) for each in columns[self.answer]]
        return self.judge.scores(CompletionBatch(completions, prompts, answers, columns, origins, reasoning, asked))


def build_rewards(
    rewards: Sequence[RewardConfig], columns: Collection[str], access: JudgeAccess = NO_ACCESS
) -> list[Reward]:
    """All rewards, their names made unique.

    Raises FtcliError FT451 and FT452 for a user's function that cannot be loaded; FT280 for a JSON Schema that is none;
    FT453 (exit 4) when a reward needs a column that the data lacks; FT454 (exit 4) for columns with reserved names;
    FT470 where the key of an address is not set.
    """
    taken = reserved_column(columns)
    if taken is not None:
        raise FtcliError([taken], ExitCode.DATA)
    built: list[Reward] = []
    for config in rewards:
        missing = missing_answer(config, columns)
        if missing is not None:
            raise FtcliError([missing], ExitCode.DATA)
        name = judge_name(config) if config.file is None else config.file.rpartition(":")[2]
        same = sum(r.name.split("#")[0] == name for r in built)
        compares = config.use is not None and judges.row(config.use).compares
        built.append(
            Reward(
                f"{name}#{same + 1}" if same else name,
                config.weight,
                open_judge(config, access),
                config.answer if compares else None,
            )
        )
    return built


#: Of a reward and a batch: completions, failures, the first of them in words, and what its judge measured.
Noted = tuple[int, int, str | None, Mapping[str, float]]
#: Of a reward and a batch: completions that were judged, and those of them that it failed on.
Counted = tuple[int, int]


@dataclass(slots=True)
class RewardFailures:
    """How often each reward failed, over the newest completions of the run: all ranks', also across resuming."""

    max_fraction: float
    reporter: Reporter
    _batches: dict[str, deque[Counted]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _newest: dict[str, Noted] = field(default_factory=dict)

    def note(self, reward: Reward, scores: JudgeScores) -> None:
        """Notes this rank's completions."""
        example = f"{scores.example}; the completion {reward.becomes}" if scores.failed else None
        self._newest[reward.name] = (len(scores.values), len(scores.failed), example, dict(reward.judge.measured()))

    def newest(self) -> dict[str, Noted]:
        """What was noted since the last call, by reward."""
        found, self._newest = self._newest, {}
        return found

    def add(self, reward: str, judged: int, failed: int, example: str | None = None) -> None:
        """Counts a batch of a reward, over all ranks. The first failure is told as FT457.

        Raises FtcliError FT456 (exit 4) where it fails on more than the share that the recipe lets pass.
        """
        if example is not None and reward not in self._told:
            self._told.add(reward)
            help = f"this is said once; metrics.jsonl has the share as rewards/{reward}/failed"
            self.reporter.finding(Finding("FT457", example, help=help, severity="warning"))
        batches = self._batches.setdefault(reward, deque())
        batches.append((judged, failed))
        while sum(count for count, _ in batches) - batches[0][0] >= WINDOW:
            batches.popleft()
        of, failures = sum(count for count, _ in batches), sum(count for _, count in batches)
        if failures > self.max_fraction * max(of, _AT_LEAST):
            raise FtcliError.single(
                "FT456",
                f"the reward {reward} could not judge {failures:,} of the last {of:,} completions; "
                f"grpo.reward_failures.max_fraction {self.max_fraction:g} allows at most "
                f"{int(self.max_fraction * max(of, _AT_LEAST)):,} pass",
                help="fix the reward (FT457 says what it failed on first), or raise max_fraction",
            )

    def state(self) -> dict[str, list[list[int]]]:
        """For a checkpoint."""
        return {name: [list(each) for each in batches] for name, batches in self._batches.items()}

    def restore(self, state: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Continues from what :meth:`state` gave."""
        self._batches = {
            name: deque((int(count), int(failed)) for count, failed in batches) for name, batches in state.items()
        }


@dataclass(slots=True)
class Stagnation:
    """What the stops of a run have seen.

    Attributes:
        settings: None: nothing is looked for.
        rewards: Mean rewards of the rollouts since the last measurement.
        best: The best measurement, as :class:`BestEvaluation` counts: negated.
        entropy: That of the last step that had any, in nats a token.
    """

    settings: GrpoStoppingConfig | None = None
    rewards: list[float] = field(default_factory=list)
    best: BestEvaluation = field(default_factory=BestEvaluation)
    low: int = 0
    entropy: float | None = None

    def note(self, step: int, rewards: Sequence[float], entropies: Sequence[float]) -> None:
        """Takes a finished step into account.

        Args:
            rewards: The mean reward of each rollout in it; NaN where no completion had one.
            entropies: The mean entropy of sampled tokens of each micro-batch that was trained on, in nats.
        """
        settings = self.settings
        if settings is None:
            return
        if settings.reward is not None:
            for reward in rewards:
                self._measure(step, reward, settings.reward.window, settings.reward.min_delta)
        if settings.entropy is not None and entropies:
            self.entropy = math.fsum(entropies) / len(entropies)
            self.low = self.low + 1 if self.entropy < settings.entropy.min_entropy else 0

    def _measure(self, step: int, reward: float, window: int, min_delta: float) -> None:
        if math.isfinite(reward):
            self.rewards.append(reward)
        if len(self.rewards) == window:
            self.best.note(step, {"eval_loss": -math.fsum(self.rewards) / window}, min_delta)
            self.rewards.clear()

    @property
    def reason(self) -> str | None:
        """Why training ends; None while it goes on."""
        settings = self.settings
        if settings is None:
            return None
        reward, entropy = settings.reward, settings.entropy
        if reward is not None and self.best.value is not None and self.best.worse >= reward.patience:
            by = f" by more than {reward.min_delta:g}" if reward.min_delta else ""
            return (
                f"the mean reward of {reward.window} rollouts has not risen{by} in {self.best.worse} measurements; its "
                f"highest was {-self.best.value:.4g}, at step {self.best.step}"
            )
        if entropy is not None and self.entropy is not None and self.low >= entropy.patience:
            return (
                f"entropy was below {entropy.min_entropy:g} nats a token in {self.low} steps in a row, "
                f"{self.entropy:.2g} in the last"
            )
        return None

    def state(self) -> JsonObject:
        """What a checkpoint keeps, as JSON values."""
        best = {"value": self.best.value, "step": self.best.step, "worse": self.best.worse}
        return {"rewards": list(self.rewards), "best": best, "low": self.low, "entropy": self.entropy}

    def restore(self, state: JsonObject) -> None:
        """Goes on from what :meth:`state` returned."""
        self.rewards, self.best = list(state["rewards"]), BestEvaluation(**state["best"])
        self.low, self.entropy = state["low"], state["entropy"]
