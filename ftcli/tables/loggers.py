"""Metrics loggers: where a run's numbers go besides metrics.jsonl. A row's name is a key of the section ``logging``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logger:
    """One metrics logger.

    Attributes:
        code: Its class, or a function that opens it, ``package.module:attribute`` (``ftcli.run.loggers.OpenLogger``).
        environment: Environment variables while a command runs, where the user has not set them.
        buffered: It loses its latest numbers when the process is killed. After a resume it is given them again, and
            ignores the steps that it already has.
        settings: Instead of `true` a recipe may give project, entity and group.
    """

    package: str
    install: str
    about: str
    code: str
    environment: Mapping[str, str] = field(default_factory=dict)
    buffered: bool = False
    settings: bool = False


TABLE: Mapping[str, Logger] = {
    "tensorboard": Logger(
        package="tensorboard",
        install="ftcli[tensorboard]",
        about="Also write TensorBoard files, to `tensorboard/` in the run directory.",
        code="ftcli.run.loggers:TensorBoardLogger",
    ),
    "wandb": Logger(
        package="wandb",
        install="ftcli[wandb]",
        about="Also log to Weights & Biases; a section says to which project, entity and group.",
        code="ftcli.run.loggers:WandbLogger",
        environment={"WANDB_ERROR_REPORTING": "false", "WANDB_PROJECT": "ftcli"},
        buffered=True,
        settings=True,
    ),
    "trackio": Logger(
        package="trackio",
        install="ftcli[trackio]",
        about="Also log to Trackio, project `ftcli`.",
        code="ftcli.run.loggers:TrackioLogger",
    ),
    "mlflow": Logger(
        package="mlflow",
        install="ftcli[mlflow]",
        about="Also log to MLflow, experiment `ftcli`.",
        code="ftcli.run.loggers:MlflowLogger",
        # Its own seven retries of two minutes would hold training up for longer than a curve is worth.
        environment={
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_LOGGING_LEVEL": "WARNING",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
        },
    ),
}


def names() -> tuple[str, ...]:
    """The switches of a recipe's ``logging`` section."""
    return tuple(TABLE)


def row(name: str) -> Logger:
    return TABLE[name]
