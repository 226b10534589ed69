"""The newest completions of a GRPO run, out of what TRL keeps of them for its own tables."""

from __future__ import annotations

import math

from ftcli.plain import JsonMap, JsonObject
from ftcli.run.completions import ScoredCompletion


def newest(logs: JsonMap) -> list[ScoredCompletion]:
    """The completions of the newest generation batch, with their rewards and advantages.

    Args:
        logs: TRL 1.16's GRPOTrainer._logs: for each name a deque as long as a generation batch; ``rewards`` is a map of
            such.
    """
    rewards = logs["rewards"]
    return [
        ScoredCompletion(
            prompt, text, {name: _opinion(values[i]) for name, values in rewards.items()}, float(advantage)
        )
        for i, (prompt, text, advantage) in enumerate(
            zip(logs["prompt"], logs["completion"], logs["advantages"], strict=True)
        )
    ]


def packed(logs: JsonMap) -> JsonObject:
    """The same as plain lists, for a checkpoint."""
    plain = {name: list(logs[name]) for name in ("prompt", "completion", "advantages")}
    return {**plain, "rewards": {name: list(values) for name, values in logs["rewards"].items()}}


def restore(logs: JsonMap, saved: JsonMap) -> None:
    """Puts back what :func:`packed` returned."""
    for name in ("prompt", "completion", "advantages"):
        logs[name].extend(saved[name])
    for name, values in saved["rewards"].items():
        logs["rewards"][name].extend(values)


def _opinion(reward: float) -> float | None:
    """TRL notes NaN for a reward that had no opinion."""
    return None if math.isnan(reward) else float(reward)
