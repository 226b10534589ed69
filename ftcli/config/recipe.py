"""The recipe as a whole. Each command reads the sections that it needs."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field

from ftcli.config.base import Section
from ftcli.config.data import DataConfig
from ftcli.config.evaluation import EvalConfig, ExportConfig, RewardConfig
from ftcli.config.model import LaunchConfig, LoraConfig, ModelConfig, QuantizationConfig
from ftcli.config.training import CheckpointConfig, LoggingConfig, RunConfig, TrainConfig
from ftcli.methods.distill.settings import DistillConfig
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.methods.preference.settings import PreferenceConfig
from ftcli.methods.reward.settings import RewardModelConfig
from ftcli.plain import JsonMap

_M = TypeVar("_M", bound=BaseModel)


class Recipe(Section):
    """One experiment. `extends` is resolved by the loader and does not reach this model."""

    version: Literal[1] = Field(description="Recipe format.")
    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    lora: LoraConfig | None = Field(default=None)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    grpo: GrpoConfig | None = Field(default=None)
    preference: PreferenceConfig | None = Field(default=None)
    reward: RewardModelConfig | None = Field(default=None)
    distill: DistillConfig | None = Field(default=None)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    export: ExportConfig = Field(default_factory=ExportConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """Judges of completions in training."""
        return () if self.grpo is None else self.grpo.rewards

    def value_of(self, key: str) -> Any:
        """The value of a dotted key; None where a section on the way is absent."""
        value: Any = self
        for name in key.split("."):
            value = None if value is None else getattr(value, name)
        return value

    def changed(self, settings: JsonMap) -> Recipe:
        """The recipe with the values of dotted keys set. They are not validated."""
        recipe = self
        for key, value in settings.items():
            recipe = _set(recipe, key.split("."), value)
        return recipe


def _set(model: _M, parts: list[str], value: Any) -> _M:
    head, *rest = parts
    return model.model_copy(update={head: _set(getattr(model, head), rest, value) if rest else value})
