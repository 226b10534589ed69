"""The recipe's rewards: opened once, and the completions that they fail on counted."""

from __future__ import annotations

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
from ftcli.reporting import Reporter
from ftcli.rows.prompts import Prompt
from ftcli.tables import judges

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
            origins: Where the row of each completion is.
            reasoning: What the model wrote before each completion; None where nothing.
            asked: The prompt of each completion as its row has it.

        Raises:
            FtcliError: FT455 (exit 4), as :meth:`ftcli.judges.Judge.scores`.
        """
        answers = [""] * len(completions) if self.answer is None else [str(each) for each in columns[self.answer]]
        return self.judge.scores(CompletionBatch(completions, prompts, answers, columns, origins, reasoning, asked))


def build_rewards(
    rewards: Sequence[RewardConfig], columns: Collection[str], access: JudgeAccess = NO_ACCESS
) -> list[Reward]:
    """All rewards, their names made unique.

    Args:
        columns: Columns of the data that are handed to each function by name.

    Raises:
        FtcliError: FT451 and FT452 for a user's function that cannot be loaded; FT280 for a JSON Schema that is none;
            FT453 (exit 4) when a reward needs a column that the data lacks; FT454 (exit 4) for columns with reserved
            names; FT470 where the key of an address is not set.
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

        Raises:
            FtcliError: FT456 (exit 4) where it fails on more than the share that the recipe lets pass.
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
