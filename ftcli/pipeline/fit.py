"""Runs a trainer inside an open run: progress, checkpoints, signals, and the result saved at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftcli.config import Recipe
from ftcli.errors import ExitCode, FtcliError
from ftcli.pipeline.lifecycle import RunContext, StepProgress, raise_if_stopped

if TYPE_CHECKING:
    from ftcli.pipeline.build import Built, Texts
    from ftcli.trainers.base import TrainerHooks


def fit(
    recipe: Recipe,
    context: RunContext,
    texts: Texts,
    built: Built,
    make_trainer: Callable[[TrainerHooks, str], Any],
    evaluate: Callable[[], dict[str, float]] | None,
) -> dict[str, Any]:
    """Trains to the end, or to the first signal, and saves adapter/ or model/.

    Args:
        make_trainer: Builds the trainer from hooks and a scratch folder.
        evaluate: Called every ``eval.every_steps`` steps.

    Raises:
        FtcliError: FT701 (exit 75 or 130) after a signal, FT702 (exit 6) on divergence, FT703 (exit 5) out of memory.
    """
    from ftcli.trainers.base import TrainerHooks, save_weights
    from ftcli.trainers.callbacks import RunCallback, Schedule

    evaluates = evaluate is not None and recipe.eval.every_steps is not None
    hooks = TrainerHooks(
        context.directory.checkpoints,
        recipe.checkpoint.keep_last,
        evaluate if evaluates else None,
        context.metrics.sync,
    )
    schedule = Schedule(
        log_every=recipe.logging.every_steps,
        evaluate_every=recipe.eval.every_steps if evaluates else None,
        save_every=recipe.checkpoint.every_steps,
    )
    with (
        tempfile.TemporaryDirectory(prefix="ftcli-") as scratch,
        StepProgress(context.session.reporter, context.command) as progress,
    ):
        trainer = make_trainer(hooks, scratch)
        callback = RunCallback(trainer, schedule, context.write_line, progress, context.stop)
        trainer.add_callback(callback)
        _loop(trainer, context)
    step = trainer.state.global_step
    raise_if_stopped(context, callback.stopped_by, step)
    target = context.save_result(
        lambda folder: save_weights(built.model, folder),
        lambda folder: texts.tokenizer.save_pretrained(str(folder)),
    )
    return {
        "run": str(context.directory.path),
        "result": str(target),
        "steps": step,
        "tokens": trainer.tokens_seen,
        "train_loss": callback.last.get("loss"),
        "reward": callback.last.get("reward"),
    }


def _loop(trainer: Any, context: RunContext) -> None:
    import torch

    resume_from = context.opened.resume_from
    try:
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from is not None else None)
    except torch.OutOfMemoryError as error:
        raise FtcliError.single(
            "FT703",
            f"out of memory at step {trainer.state.global_step + 1}: {str(error).splitlines()[0]}",
            exit_code=ExitCode.OUT_OF_MEMORY,
            help="halve train.per_device_train_batch_size and double train.gradient_accumulation_steps, or set "
            "train.gradient_checkpointing: true",
        ) from error
