"""eval.json and margins.json: how the model did, and on which rows. The report reads both.

Other parts of the program fill these values in; the names in the files are those of the fields here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.plain import LEFT_OUT, JsonMap, JsonObject, maps, plain, plain_fields
from ftcli.run.atomic import json_bytes, read_json_object, storage_errors, store_json, write_bytes

#: What is measured together with the loss.
_OF_LOSS = ("loss", "perplexity", "token_accuracy", "tokens", "measures", "datasets")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A task's result: ``value`` from 0 to 1 over ``count`` rows. ``cut`` counts answers that were cut off."""

    name: str
    value: float
    count: int
    cut: int = 0


@dataclass(frozen=True, slots=True)
class EvalScores:
    """The scores of one model. ``loss`` is in nats per token, weighted by tokens; None if it was not measured.

    ``measures`` is what a method with a loss of its own measures beside it, by name.
    ``datasets`` has loss, perplexity, token accuracy, tokens and rows of each held-out file; ``lm_eval`` the metrics of
    each task of lm-evaluation-harness.
    """

    loss: float | None = None
    perplexity: float | None = None
    token_accuracy: float | None = None
    tokens: int | None = None
    tasks: tuple[TaskScore, ...] = ()
    datasets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    lm_eval: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    measures: Mapping[str, float] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image of a row, by a digest, and made small: a data URL, empty where it cannot be read any more."""

    id: str
    url: str


@dataclass(frozen=True, slots=True)
class AnsweredRow:
    """One held-out row: what was asked, what was expected, and what the model said before and after training.

    ``before_score`` and ``after_score`` are what the task's judge says of that, mostly from 0 to 1;
    ``before_reasoning`` and ``after_reasoning`` what the model wrote before its answer; ``images`` what it saw.
    """

    prompt: str
    reference: str | None = None
    before: str | None = None
    after: str | None = None
    task: str | None = None
    before_score: float | None = None
    after_score: float | None = None
    before_reasoning: str | None = None
    after_reasoning: str | None = None
    images: tuple[ShownImage, ...] | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Content of eval.json: the base model against the run, and a few answered rows.

    ``step`` is there while training goes on: ``run`` and the samples are those after it.
    """

    base: EvalScores | None = None
    run: EvalScores | None = None
    samples: tuple[AnsweredRow, ...] = ()
    step: int | None = field(default=None, metadata=LEFT_OUT)


def update_evaluation(path: Path, measured: Evaluation) -> None:
    """Write ``measured`` into eval.json, which keeps what was measured earlier and is not measured now. A task is
    replaced by the one of its name; loss and datasets together. Raises FtcliError FT723 or FT724.
    """
    old, new = read_json_object(path), plain_fields(measured)
    tasks = {task["name"] for side in ("base", "run") for task in (new[side] or {}).get("tasks", ())}
    kept = [row for row in maps(old.get("samples")) if row.get("task") not in tasks]
    sides = {side: _updated(old.get(side), new[side]) for side in ("base", "run")}
    store_json(path, {**sides, "samples": [*new["samples"], *kept]})


@dataclass(frozen=True, slots=True)
class MarginsBeforeAndAfter:
    """Content of margins.json: held-out pairs or labelled answers one by one, before training and now.

    Each side is what :meth:`ftcli.evaluate.margins.Margins.record` gives, or empty. ``step`` is there while training
    goes on: ``after`` is how it was after it.
    """

    before: JsonMap
    after: JsonMap
    step: int | None = field(default=None, metadata=LEFT_OUT)


def write_margins(path: Path, margins: MarginsBeforeAndAfter) -> None:
    """Write margins.json; nothing where neither side has anything. Raises FtcliError FT723 or FT724."""
    if margins.before or margins.after:
        with storage_errors(path):
            write_bytes(path, json_bytes(plain(margins)))


def _updated(old: Any, new: JsonObject | None) -> JsonObject | None:
    if not isinstance(old, dict) or new is None:
        return new if new is not None else old if isinstance(old, dict) else None
    names = {task["name"] for task in new["tasks"]}
    tasks = [task for task in maps(old.get("tasks")) if task.get("name") not in names]
    harness = old.get("lm_eval")
    result = (
        new
        if new["loss"] is not None
        else {**new, **{key: old.get(key, new.get(key)) for key in _OF_LOSS if key in old or key in new}}
    )
    lm_eval = {**(harness if isinstance(harness, dict) else {}), **new["lm_eval"]}
    return {**result, "tasks": [*new["tasks"], *tasks], "lm_eval": lm_eval}
