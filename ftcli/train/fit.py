"""Runs the training loop inside an open run: progress, checkpoints, signals, and the result saved at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, FtcliError, is_out_of_memory
from ftcli.plain import FLATTENED
from ftcli.run.completions import Completions
from ftcli.run.metrics import read_metrics
from ftcli.run.report.card import write_card
from ftcli.run.status import FinishedTraining, TrainingSummary
from ftcli.tables.methods import measures, method_of
from ftcli.train.context import RunContext
from ftcli.train.lifecycle import add_to_manifest, raise_if_stopped
from ftcli.train.out_of_memory import has_room_to_save, let_go, out_of_memory_in_training, with_checkpoint
from ftcli.train.progress import StepProgress, TrainingRows, tell_start, tell_warm_ups

if TYPE_CHECKING:
    from ftcli.job import Job
    from ftcli.train.evaluation import EarlyStopping, Goal
    from ftcli.train.loop import Attendance, StepIntervals, TrainerHooks, TrainingLoop


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run with its result: both folders, and what training came to."""

    run: str
    result: str
    summary: TrainingSummary = field(metadata=FLATTENED)


def fit(
    context: RunContext,
    job: Job,
    model: Any,
    make_loop: Callable[[TrainerHooks], TrainingLoop],
    evaluate: Callable[[int], dict[str, float]] | None,
    rows: TrainingRows,
    completions_kept: int | None = None,
) -> FinishedRun:
    """Trains to the end, or to the first signal, and saves adapter/ or model/.

    A run that was stopped after its result was saved is not trained again: its trained weights are loaded.

    Args:
        make_loop: Builds the training loop from hooks.
        evaluate: Called every ``eval.every_steps`` steps, with the step.
        rows: What is trained on, for the summary at the start.
        completions_kept: Logging steps whose completions are kept; None: all that there are.

    Raises:
        FtcliError: FT701 (exit 75 or 130) after a signal, FT702 (exit 6) on divergence, FT703 (exit 5) out of memory.
    """
    from ftcli.model.trained_weights import require_saveable
    from ftcli.train.loop import Attendance

    evaluate = evaluate if job.recipe.eval.every_steps is not None else None
    with StepProgress(
        context.session.reporter, context.command, context.live, known=lambda steps: tell_warm_ups(context, steps)
    ) as progress:
        with context.phase("preparing the trainer"):
            loop = make_loop(_hooks(context, evaluate, completions_kept))
        if context.opened.trained is not None:
            return _trained_before(loop, context, context.opened.trained)
        require_saveable(model)
        tell_start(context, job, model, rows)
        intervals = _intervals(context.recipe, evaluates=evaluate is not None)
        _train(loop, context, Attendance(intervals, context.write_line, progress, context.stops))
        _tell_launches(loop, context)
        raise_if_stopped(context, loop.stopped_by, loop.step)
        _save(loop, context, job, model)
        loop.settle()
    summary = _summary(loop, context)
    if context.leads:
        context.opened.note_trained(summary)
    return FinishedRun(str(context.directory.path), str(context.directory.result_dir), summary)


def _hooks(
    context: RunContext, evaluate: Callable[[int], dict[str, float]] | None, completions_kept: int | None
) -> TrainerHooks:
    from ftcli.train.loop import TrainerHooks, not_interruptible

    recipe = context.recipe
    return TrainerHooks(
        context.checkpoints,
        recipe.checkpoint.keep_last,
        evaluate,
        context.metrics.sync,
        context.stop.interruptible if context.group is None else not_interruptible,
        keep_best=evaluate is not None and recipe.checkpoint.keep_best,
        stopping=None if evaluate is None else _stopping(recipe),
        goal=_goal(context),
        completions=Completions(context.directory.completions_dir, completions_kept, recipe.logging.every_steps).write
        if context.leads
        else None,
    )


def _intervals(recipe: Recipe, *, evaluates: bool) -> StepIntervals:
    from ftcli.train.loop import StepIntervals

    return StepIntervals(
        log_every=recipe.logging.every_steps,
        evaluate_every=recipe.eval.every_steps if evaluates else None,
        save_every=recipe.checkpoint.every_steps,
    )


def _save(loop: TrainingLoop, context: RunContext, job: Job, model: Any) -> None:
    """Writes the result, as rank 0; all ranks bring their parts of the weights."""
    from ftcli.model.trained_weights import check_saved, save_weights

    with _saving_on_failure(loop, context), loop.optimization.evaluated_weights():
        whole = loop.parallel.whole_weights()
        if context.leads:
            context.save_result(
                lambda folder: save_weights(model, folder, whole),
                lambda folder: check_saved(model, folder, whole),
                lambda folder: _add_further(context, model, folder),
                lambda folder: job.tokenizer.save_pretrained(str(folder)),
                lambda folder: _add_processors(context, folder),
                lambda folder: write_card(context.directory, folder),
            )


def _add_processors(context: RunContext, folder: Path) -> None:
    """Of a full fine-tune of a multimodal model, adds how it prepares images."""
    if context.recipe.lora is None:
        from ftcli.export.images import copy_processors

        copy_processors(context.recipe.model, folder, offline=context.session.offline)


def _add_further(context: RunContext, model: Any, folder: Path) -> None:
    """Of a full fine-tune, adds the base's tensors that transformers passes over; a merged adapter gets them later."""
    if context.recipe.lora is not None or method_of(context.recipe, "train").classifier:
        return
    from ftcli.export.further import keep_passed_over

    session = context.session
    keep_passed_over(model, context.recipe.model, folder, offline=session.offline, tell=session.reporter.finding)


def _stopping(recipe: Recipe) -> EarlyStopping | None:
    from ftcli.train.evaluation import EarlyStopping

    settings = recipe.train.early_stopping
    return None if settings is None else EarlyStopping(settings.patience, settings.min_delta)


def _goal(context: RunContext) -> Goal | None:
    from ftcli.train.evaluation import Goal

    metric = context.recipe.train.metric_for_best_model
    if metric is None:
        return None
    return Goal(metric, measures(context.report.plan.method, context.recipe)[metric])


def _trained_before(loop: TrainingLoop, context: RunContext, trained: FinishedTraining) -> FinishedRun:
    result = context.directory.result_dir
    assert result is not None  # else training is not over
    with context.phase("loading the trained weights"):
        loop.take_weights(result)
    return FinishedRun(str(context.directory.path), str(result), trained.summary)


def _summary(loop: TrainingLoop, context: RunContext) -> TrainingSummary:
    """Loss and reward are those of the last step; from metrics.jsonl when this process trained no step."""
    metrics = read_metrics(context.metrics.path).lines
    line = loop.last_line or next((m for m in reversed(metrics) if "loss" in m), {})
    computed = loop.tokens_computed or None
    steps, tokens = loop.step, loop.tokens_seen
    return TrainingSummary(steps, tokens, line.get("loss"), line.get("reward"), computed, loop.why_over)


def _train(loop: TrainingLoop, context: RunContext, attendance: Attendance) -> None:
    resume_from = context.opened.resume_from
    if resume_from is not None and loop.load_finished(resume_from):
        return
    from ftcli.train.evaluation import TrainingOver

    with _saving_on_failure(loop, context), contextlib.suppress(TrainingOver):
        loop.run(attendance, resume_from)
    if loop.is_over:
        context.session.reporter.info(f"stopped early: {loop.why_over}")


def _tell_launches(loop: TrainingLoop, context: RunContext) -> None:
    """CUDA graphs that were given up, or not made for all shapes, are said and kept in the manifest."""
    graphs = loop.cuda_graphs()
    if graphs is not None and graphs != "on":
        add_to_manifest(context, {"cuda_graphs": graphs})
        context.session.reporter.info(f"CUDA graphs: {graphs}")


@contextlib.contextmanager
def _saving_on_failure(loop: TrainingLoop, context: RunContext) -> Any:
    """Saves the finished steps in a checkpoint when the block fails, unless it diverged or could not write.

    Raises FT703 when memory ran out; all other errors are raised again as they are.
    """
    try:
        yield
    except FtcliError as error:
        own = error.exit_code in (ExitCode.OUT_OF_MEMORY, ExitCode.DATA)
        if not own and not _of_another_rank(error, context):
            raise
        let_go(error)
        checkpoint = _save_after_failure(loop, context)
        if checkpoint is None or not own or not context.leads:
            raise
        raise with_checkpoint(error, checkpoint) from error
    except Exception as error:
        if is_out_of_memory(error):
            short = out_of_memory_in_training(loop, context.report, error)
            raise _with_saved(loop, context, short) from error
        _save_after_failure(loop, context)
        raise


def _of_another_rank(error: FtcliError, context: RunContext) -> bool:
    """True if the weights of this rank are sound, and another one has failed for a reason that spoils no checkpoint."""
    if context.group is None:
        return False
    from ftcli.run.heartbeat import PeerFailed, RankLost

    if isinstance(error, RankLost):
        return context.group.settled()
    return isinstance(error, PeerFailed) and error.exit_code not in (ExitCode.DIVERGED, ExitCode.PREFLIGHT)


def _with_saved(loop: TrainingLoop, context: RunContext, error: FtcliError) -> FtcliError:
    checkpoint = _save_after_failure(loop, context)
    if checkpoint is None or not context.leads:  # the leading rank writes it, later than this one looks
        return error
    return with_checkpoint(error, checkpoint)


def _save_after_failure(loop: TrainingLoop, context: RunContext) -> Path | None:
    """The newest checkpoint, after trying to write one. Errors are ignored here: the first one is to be reported."""
    with contextlib.suppress(FtcliError, RuntimeError, MemoryError, OSError):
        if has_room_to_save(loop):
            loop.save_after_failure()
    with contextlib.suppress(OSError):
        return context.directory.checkpoints.newest()
    return None
