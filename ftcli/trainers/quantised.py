"""How training goes from exact to quantised weights and activations, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ftcli.config import QuantizationConfig
from ftcli.tables import code_of, quantizations


class WarmUp(TrainerCallback):  # type: ignore[misc]
    """Sets the share of quantised values before each step: step / steps, at most 1.

    It follows from the number of the step alone, so a run that goes on has the share of one that never stopped.

    Args:
        model: What is trained.
        steps: Steps until all values are quantised.
        set_share: Sets the share of a model.
    """

    def __init__(self, model: nn.Module, steps: int, set_share: Callable[[nn.Module, float], None]) -> None:
        self._model, self._steps, self._set_share = model, steps, set_share

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The share of the step that begins."""
        self._set_share(self._model, min(state.global_step / self._steps, 1.0))


def warm_up(trainer: Trainer, settings: QuantizationConfig) -> None:
    """Has ``trainer`` warm up where the recipe asks for it and the method trains quantised weights."""
    training = quantizations.row(settings.method).training
    if training is not None and settings.lambda_warmup_steps:
        trainer.add_callback(WarmUp(trainer.model, settings.lambda_warmup_steps, code_of(training.share)))
