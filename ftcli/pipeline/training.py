"""`ftcli train` with ``train.method: sft``: recipe in, adapter or model out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.pipeline.context import BuiltModel, RunContext
from ftcli.pipeline.fit import FinishedRun, fit
from ftcli.pipeline.held_out import HeldOut, began_in, held_out_numbers
from ftcli.pipeline.lifecycle import add_to_manifest, checked_run, keep_inputs
from ftcli.pipeline.progress import held_out_line
from ftcli.pipeline.results import CompleteRun, complete_result, write_token_counts
from ftcli.pipeline.start import TrainingRows
from ftcli.plain import SPREAD
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.data.order import ComputedTokens, Epochs
    from ftcli.data.prepare import PreparedData
    from ftcli.facts.batches import Batches
    from ftcli.job import Job
    from ftcli.run.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class SupervisedResult:
    """What `ftcli train` answers: the run, and held-out numbers by name; none without held-out data."""

    fitted: FinishedRun = field(metadata=SPREAD)
    eval: Mapping[str, float]
    seconds: float


def train_supervised(
    loaded: LoadedRecipe, session: Session, group: RankGroup | None = None
) -> SupervisedResult | CompleteRun:
    """Trains the recipe into its run directory, as one of the ranks of ``group`` where there are several.

    Raises FtcliError for everything that a user can cause; exit 75 or 130 after a signal, with a checkpoint written.
    """
    with checked_run(loaded, session, "train", group) as context:
        if context is None:
            return complete_result(loaded.recipe, session)
        return _train(session, context)


def _train(session: Session, context: RunContext) -> SupervisedResult:
    with context.phase("loading libraries"):
        from ftcli.evaluate.suite import Evaluator
        from ftcli.job import open_job
        from ftcli.methods.sft.objective import build_sft
        from ftcli.model.quantized import quantized_layers
        from ftcli.pipeline import build, data
        from ftcli.train.graphed import why_not_graphed

    started, group = time.perf_counter(), context.group
    with context.phase("preparing data"), nullcontext() if group is None else group.after_leader("data"):
        job = open_job(context.report, session)
        train_data, eval_data = data.tokenized(job, "train"), data.tokenized(job, "eval")
        epochs = data.training_epochs(job, train_data)
        planned = job.report.setup.execution.batches
        computed = _counted(context, job, epochs, train_data, eval_data, planned)
    with context.phase("loading the model"):
        with nullcontext() if group is None else group.after_leader("weights", lambda: build.to_download(job) > 0):
            model = build.build_trainable(job)
        kernels = build.put_on_kernels(job, model, train_data.sequences)
        batches = build.laid_out(job, model, epochs.sequences)
        if batches != planned:
            computed = _counted(context, job, epochs, train_data, eval_data, batches)
        graphs, layout = why_not_graphed(job, model) or "on", data.EpochLayout(batches, computed)
        built = BuiltModel(kernels.table, kernels.self_check, quantized_layers(model), graphs, layout)
        add_to_manifest(context, built)
        held_out = HeldOut(context.directory, Evaluator(job, eval_data.sequences, group=group), model)
        if group is not None:
            build.form_group(job, group)
            build.spread_weights(job, model, group)
    if context.leads:
        keep_inputs(context, build.inputs_of(job, model, train_data.sequences.digest()))
    _before(context, held_out)
    fitted = fit(
        context,
        job,
        model,
        lambda hooks: build_sft(job, model, epochs, hooks, group),
        held_out.after_step if job.recipe.data.eval else None,
        TrainingRows(len(train_data.sequences), "rows", sum(ledger.tokens for ledger in train_data.ledgers)),
    )
    return SupervisedResult(fitted, _after(context, held_out, fitted.summary.steps), time.perf_counter() - started)


def _before(context: RunContext, held_out: HeldOut) -> None:
    """Measures the model before training, once in a run, where it is evaluated during training as well."""
    recipe = context.recipe
    if context.opened.resume_step:
        held_out.resume(began_in(context.opened))
    elif recipe.data.eval and recipe.eval.every_steps is not None:
        with context.phase("evaluating"):
            found = held_out_line({f"eval_{name}": value for name, value in held_out.begin().items()})
        context.session.reporter.info(f"held-out before training: {found}")


def _after(context: RunContext, held_out: HeldOut, steps: int) -> Mapping[str, float]:
    """Measures the trained model; nothing without held-out data."""
    with context.phase("evaluating"):
        final = held_out.end()
        if final is not None:
            values = {f"eval_{name}": value for name, value in held_out_numbers(final).items()}
            context.write_line({"step": steps, **values})
            context.session.reporter.info(f"held-out loss {final.loss:.4f}, token accuracy {final.token_accuracy:.1%}")
    return held_out_numbers(final)


def _counted(
    context: RunContext, job: Job, epochs: Epochs, train_data: PreparedData, eval_data: PreparedData, batches: Batches
) -> ComputedTokens:
    """What an epoch computes in ``batches``; written to tokens.json."""
    from ftcli.pipeline.data import computed_with

    computed = computed_with(job, epochs, train_data, batches)
    if not context.leads:
        return computed
    ledgers = {"train": train_data.ledgers, "eval": eval_data.ledgers}
    write_token_counts(context.directory.tokens_path, ledgers, epochs, computed, batches.layout)
    return computed
