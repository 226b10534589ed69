"""tokens.json and eval.json: what was read of the data, and how the model did.

Both are written by other parts and read by the report; their layout is defined here, once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ftcli.run.atomic import finite, storage_errors, write_json


@dataclass(frozen=True, slots=True)
class DatasetTokens:
    """What became of one data set's rows and tokens.

    ``rows`` were read; ``rows_kept`` are trained on, ``rows_dropped`` and ``rows_truncated`` were too long.
    ``tokens`` were rendered; ``tokens_kept`` go into the model, ``tokens_cut`` were cut off or dropped with their
    rows, ``tokens_masked`` are of ``tokens_kept`` and bear no loss.
    """

    name: str
    split: str
    rows: int
    rows_kept: int
    rows_dropped: int
    rows_truncated: int
    tokens: int
    tokens_kept: int
    tokens_cut: int
    tokens_masked: int
    longest: int


def write_tokens(path: Path, datasets: Sequence[DatasetTokens]) -> None:
    """Write tokens.json: ``{"datasets": [...]}``.

    Raises:
        FtcliError: FT723 or FT724 when it cannot be written.
    """
    with storage_errors(path):
        write_json(path, {"datasets": [asdict(dataset) for dataset in datasets]})


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
