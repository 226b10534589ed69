"""`grpo.early_stopping`: ends training when rewards rise no more, or when no entropy is left to explore with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ftcli.methods.grpo.settings import GrpoStoppingConfig
from ftcli.plain import JsonObject
from ftcli.train.evaluation import BestEvaluation


@dataclass(slots=True)
class Stagnation:
    """What the stops of a run have seen.

    Attributes:
        settings: None: nothing is looked for.
        rewards: Mean rewards of the rollouts since the last measurement.
        best: The best measurement, as :class:`BestEvaluation` counts: negated.
        low: Steps in a row with too little entropy.
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
