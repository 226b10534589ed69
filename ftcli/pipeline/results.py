"""What commands leave in eval.json and tokens.json, and give back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config import Recipe
from ftcli.data.ledger import DatasetLedger
from ftcli.data.order import Epochs, padding_of
from ftcli.data.tokens import Ints
from ftcli.errors import FtcliError
from ftcli.plain import plain_fields
from ftcli.reporting import Session
from ftcli.run.atomic import read_json_object
from ftcli.run.directory import RunDirectory
from ftcli.run.results import (
    AnsweredRow,
    DatasetTokens,
    EpochTokens,
    Evaluation,
    Scores,
    TaskScore,
    write_evaluation,
    write_tokens,
)

if TYPE_CHECKING:
    from ftcli.evaluate.loss import LossResult
    from ftcli.evaluate.suite import Evaluator, ModelScores
    from ftcli.evaluate.tasks import TaskResult

#: Held-out rows that are shown in the report.
SAMPLES = 4


@dataclass(frozen=True, slots=True)
class CompleteRun:
    """The run is there already: nothing was done."""

    run: str
    already_complete: bool = True


def complete_result(recipe: Recipe, session: Session) -> CompleteRun:
    """The answer when the run is there already."""
    path = Path(str(recipe.run.output_dir))
    session.reporter.info(
        f"{path} holds the finished run of this recipe; use --resume never to train again (the old run is kept)"
    )
    return CompleteRun(str(path))


def scores(measured: ModelScores) -> Scores | None:
    """One model's results in eval.json's layout; None when nothing was measured."""
    loss, tasks = measured.loss, measured.tasks
    if loss is None and not tasks:
        return None
    return _of_loss(
        loss,
        tasks=_task_scores(tasks),
        datasets={name: plain_fields(part) for name, part in measured.datasets.items()},
        lm_eval=measured.lm_eval,
    )


def _task_scores(tasks: Mapping[str, TaskResult]) -> tuple[TaskScore, ...]:
    return tuple(TaskScore(task.name, task.score, task.rows) for task in tasks.values())


def _of_loss(loss: LossResult | None, **others: Any) -> Scores:
    if loss is None:
        return Scores(**others)
    return Scores(loss.loss, loss.perplexity, loss.token_accuracy, loss.tokens, **others)


def answered_rows(evaluator: Evaluator, model: Any) -> list[AnsweredRow]:
    """The first held-out rows answered by the trained model and, where adapters can be switched off, before it."""
    try:
        after = evaluator.samples(model, SAMPLES)
    except FtcliError:  # plain text has no prompt to show an answer for
        return []
    before: list[str | None] = [None] * len(after)
    if hasattr(model, "disable_adapter"):
        from ftcli.model.initial import as_base

        with as_base(model):
            before = [row.completion for row in evaluator.samples(model, SAMPLES)]
    return [
        AnsweredRow(row.prompt, row.reference, earlier, row.completion)
        for row, earlier in zip(after, before, strict=True)
    ]


def task_samples(base: Mapping[str, TaskResult], run: Mapping[str, TaskResult]) -> tuple[AnsweredRow, ...]:
    """The rows that tasks keep, as the base model and, once there is one, the trained model answered them."""
    rows: list[AnsweredRow] = []
    for name in dict.fromkeys((*base, *run)):
        before, after = (tasks[name].samples if name in tasks else () for tasks in (base, run))
        for b, a in zip_longest(before, after):
            row = a or b
            said = [None if answered is None else answered.completion for answered in (b, a)]
            rows.append(AnsweredRow(row.prompt, row.reference, said[0], said[1], name))
    return tuple(rows)


def write_tasks(directory: RunDirectory, before: Mapping[str, TaskResult], after: Mapping[str, TaskResult]) -> None:
    """eval.json of a run that is scored by tasks before and after training; nothing when it has no tasks."""
    if before or after:
        base, run = (Scores(tasks=_task_scores(tasks)) if tasks else None for tasks in (before, after))
        write_evaluation(directory.eval_path, Evaluation(base, run, task_samples(before, after)))


def tasks_before(directory: RunDirectory) -> dict[str, TaskResult]:
    """What :func:`write_tasks` has written before training began; what is missing or damaged is left out."""
    from ftcli.evaluate.tasks import JudgedRow, TaskResult

    raw = read_json_object(directory.eval_path)
    found: dict[str, TaskResult] = {}
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        for task in raw["base"]["tasks"]:
            rows = [row for row in raw["samples"] if row["task"] == task["name"] and row["before"] is not None]
            kept = tuple(JudgedRow(row["prompt"], row["reference"], row["before"]) for row in rows)
            found[task["name"]] = TaskResult(task["name"], "", float(task["value"]), int(task["count"]), kept)
    return found


def write_train_evaluation(directory: RunDirectory, loss: LossResult | None, samples: Sequence[AnsweredRow]) -> None:
    """eval.json after training: the trained model only; `ftcli eval` adds the base model and the tasks."""
    trained = None if loss is None else _of_loss(loss)
    write_evaluation(directory.eval_path, Evaluation(run=trained, samples=tuple(samples)))


def write_token_counts(
    path: Path, ledgers: Mapping[str, Sequence[DatasetLedger]], epochs: Epochs, lengths: Ints, batch_size: int
) -> None:
    """Writes tokens.json from the ledgers of each split and from the order of the first epoch.

    Args:
        lengths: Tokens of every training row.
        batch_size: Sequences in a batch, which is padded to its longest.

    Raises FtcliError FT723 or FT724 when it cannot be written.
    """
    datasets = tuple(_dataset(split, ledger) for split, some in ledgers.items() for ledger in some)
    real, padding = padding_of(epochs, lengths, batch_size)
    epoch = EpochTokens(
        rows=len(epochs) if epochs.packs is None else len(epochs.packs.rows),
        sequences=len(epochs),
        packed=epochs.packs is not None,
        tokens=real,
        tokens_padded=padding,
        padded_share=padding / (real + padding),
    )
    write_tokens(path, datasets, epoch)


def _dataset(split: str, ledger: DatasetLedger) -> DatasetTokens:
    return DatasetTokens(
        name=ledger.name,
        split=split,
        layout=ledger.layout,
        rows=ledger.rows,
        rows_kept=ledger.kept_rows,
        rows_dropped=ledger.dropped_rows,
        rows_truncated=ledger.truncated_rows,
        rows_skipped=ledger.bad_rows,
        skipped_by_code=ledger.bad_codes,
        tokens=ledger.all_tokens,
        tokens_kept=ledger.tokens,
        tokens_cut=ledger.cut_tokens + ledger.dropped_tokens,
        tokens_masked=ledger.masked_tokens,
        tokens_trained=ledger.supervised_tokens,
        longest=ledger.length_quantiles.get("max", 0),
        length_quantiles=ledger.length_quantiles,
        counts=ledger.counts,
    )
