"""Training of weights that are quantised in every pass: when they are quantised anew, and how far."""

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


class QuantiseOncePerStep(TrainerCallback):  # type: ignore[misc]
    """Tells a model after each step that its weights are others, so that they are quantised once a step.

    And before the first micro-batch of one, since a run that goes on has loaded them.
    """

    def __init__(self, model: nn.Module, written: Callable[[nn.Module], None]) -> None:
        self._model, self._written = model, written

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Weights may have been loaded, or put back."""
        self._written(self._model)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The optimizer has written."""
        self._written(self._model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is evaluated and saved may be an average of the weights."""
        self._written(self._model)


def train_quantised(trainer: Trainer, settings: QuantizationConfig, *, trained: bool) -> None:
    """Has ``trainer`` do what the method needs for base weights that are ``trained``: nothing for most methods."""
    training = quantizations.row(settings.method).training
    if training is None or not trained:
        return
    trainer.add_callback(QuantiseOncePerStep(trainer.model, code_of(training.written)))
    if settings.lambda_warmup_steps:
        trainer.add_callback(WarmUp(trainer.model, settings.lambda_warmup_steps, code_of(training.share)))
