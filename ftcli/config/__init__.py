"""Recipes: frozen, strict configuration models and the loader that knows where every value came from."""

from ftcli.config.data import DataConfig, DatasetConfig
from ftcli.config.evaluation import EvalConfig, ExportConfig, GenerateConfig, TaskConfig
from ftcli.config.model import LaunchConfig, LoraConfig, ModelConfig, QuantizationConfig
from ftcli.config.recipe import Recipe
from ftcli.config.training import (
    CheckpointConfig,
    GrpoConfig,
    LoggingConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DatasetConfig",
    "EvalConfig",
    "ExportConfig",
    "GenerateConfig",
    "GrpoConfig",
    "LaunchConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "QuantizationConfig",
    "Recipe",
    "RewardConfig",
    "RunConfig",
    "TaskConfig",
    "TrainConfig",
]
