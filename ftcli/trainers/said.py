"""The newest completions of a GRPO run, out of what TRL keeps of them for its own tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ftcli.data.asked import RenderedPrompt
from ftcli.data.reasoning import Answer, ReasoningMarks
from ftcli.generation.stopping import cut
from ftcli.plain import JsonMap, JsonObject
from ftcli.run.completions import ScoredCompletion

#: What TRL's extra column, and the argument of rewards, are called.
REASONING = "completion_reasoning"


@dataclass(frozen=True, slots=True)
class Answers:
    """Completions as rewards and people see them: the answer, up to a stop string, beside its reasoning."""

    marks: ReasoningMarks
    asked: Sequence[RenderedPrompt]
    stop_strings: tuple[str, ...]

    def of(self, row: int, tokens: Sequence[int]) -> Answer:
        """What the model said to a row."""
        asked = self.asked[row]
        said = self.marks.split(tokens, asked.text, templated=asked.templated)
        return replace(said, text=cut(said.text, self.stop_strings))


def newest(logs: JsonMap) -> list[ScoredCompletion]:
    """The completions of the newest generation batch, with their rewards and advantages.

    Args:
        logs: TRL 1.16's GRPOTrainer._logs: for each name a deque as long as a generation batch; ``rewards`` is a map of
            such.
    """
    rewards = logs["rewards"]
    reasoning = list(logs["extra"][REASONING]) or [None] * len(logs["prompt"])  # a checkpoint of an older version
    return [
        ScoredCompletion(
            prompt,
            text,
            {name: _opinion(values[i]) for name, values in rewards.items()},
            float(advantage),
            reasoning[i],
        )
        for i, (prompt, text, advantage) in enumerate(
            zip(logs["prompt"], logs["completion"], logs["advantages"], strict=True)
        )
    ]


def packed(logs: JsonMap) -> JsonObject:
    """The same as plain lists, for a checkpoint."""
    plain = {name: list(logs[name]) for name in ("prompt", "completion", "advantages")}
    several = {kind: {name: list(values) for name, values in logs[kind].items()} for kind in ("rewards", "extra")}
    return {**plain, **several}


def restore(logs: JsonMap, saved: JsonMap) -> None:
    """Puts back what :func:`packed` returned."""
    for name in ("prompt", "completion", "advantages"):
        logs[name].extend(saved[name])
    for kind in ("rewards", "extra"):
        for name, values in saved.get(kind, {}).items():
            logs[kind][name].extend(values)


def _opinion(reward: float) -> float | None:
    """TRL notes NaN for a reward that had no opinion."""
    return None if math.isnan(reward) else float(reward)
