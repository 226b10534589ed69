"""eval.json: how the model did. Written by other parts and read by the report; its layout is defined here, once."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftcli.run.atomic import finite, storage_errors, write_json


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task's result: ``value`` in 0..1 over ``count`` rows."""

    name: str
    value: float
    count: int


@dataclass(frozen=True, slots=True)
class Scores:
    """How one model did. ``loss`` is in nats per token, weighted by tokens; None where it was not measured.

    ``datasets`` has loss, perplexity, token accuracy, tokens and rows of each held-out file; ``lm_eval`` the metrics of
    each task of lm-evaluation-harness.
    """

    loss: float | None = None
    perplexity: float | None = None
    token_accuracy: float | None = None
    tokens: int | None = None
    tasks: tuple[TaskScore, ...] = ()
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    lm_eval: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """One held-out row: what was asked, what was expected, and what the model said before and after training."""

    prompt: str
    reference: str | None = None
    before: str | None = None
    after: str | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What eval.json holds: the base model against the run, and a few samples."""

    base: Scores | None = None
    run: Scores | None = None
    samples: tuple[Sample, ...] = field(default=())


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write eval.json; NaN and infinity become null.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(path):
        write_json(path, finite(asdict(evaluation)))


def read_json_object(path: Path) -> dict[str, Any]:
    """The map in a JSON file; empty when the file is missing, damaged or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
