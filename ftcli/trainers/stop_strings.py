"""Texts that end GRPO's completions: TRL knows of tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ftcli.generation.stopping import StopCheck

if TYPE_CHECKING:
    from collections import defaultdict


class StopStringsMixin:
    """Mixed into TRL's GRPOTrainer. Completions keep the tokens of the text that ended them, which are trained; what
    rewards see, and what is shown, ends before it (:class:`ftcli.trainers.said.Answers`), as in evaluation.
    """

    stop_strings: tuple[str, ...] = ()
    #: What ends a completion; set with ``stop_strings``.
    stopping: StopCheck
    _metrics: dict[str, defaultdict[str, list[float]]]

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """As TRL: prompts, then completions as tokens, and more."""
        found: tuple[Any, ...] = super()._generate(prompts)  # type: ignore[misc]
        if self.stop_strings:
            self._say_how_they_ended(found[1])
        return found

    def _say_how_they_ended(self, completions: Sequence[Sequence[int]]) -> None:
        """TRL has counted those that a text ended as cut off (1.16, GRPOTrainer._generate)."""
        noted = self._metrics["train" if self.model.training else "eval"]  # type: ignore[attr-defined]
        ended = [self.stopping.stopped(tokens) for tokens in completions]
        lengths = torch.tensor([len(t) for t, whole in zip(completions, ended, strict=True) if whole] or [0]).float()
        noted["completions/clipped_ratio"][-1] = 1.0 - sum(ended) / len(ended)
        for name, value in (("mean", lengths.mean()), ("min", lengths.min()), ("max", lengths.max())):
            noted[f"completions/{name}_terminated_length"][-1] = float(value)
