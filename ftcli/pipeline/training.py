"""`ftcli train`: recipe in, adapter or model out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftcli.config import Recipe
from ftcli.config.load import LoadedRecipe
from ftcli.data.prepare import Prepared
from ftcli.pipeline.fit import fit
from ftcli.pipeline.lifecycle import RunContext, add_to_manifest, checked_run, keep_inputs
from ftcli.pipeline.results import answered_rows, complete_result, write_token_counts, write_train_evaluation
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.evaluate.suite import Evaluator
    from ftcli.pipeline import build


def run(loaded: LoadedRecipe, session: Session) -> dict[str, Any]:
    """Trains the recipe into its run directory and returns a summary.

    Raises FtcliError for everything that a user can cause; exit 75 or 130 after a signal, with a checkpoint written.
    """
    with checked_run(loaded, session, "train") as context:
        if context is None:
            return complete_result(loaded.recipe, session)
        return _train(session, context)


def _train(session: Session, context: RunContext) -> dict[str, Any]:
    from ftcli.pipeline import build
    from ftcli.trainers.sft import build_sft_trainer

    started = time.perf_counter()
    recipe, report = context.recipe, context.report
    with context.phase("preparing data"):
        texts = build.texts_of(recipe, report, session)
        train_data = build.tokenized(recipe, session, texts, "train")
        eval_data = build.tokenized(recipe, session, texts, "eval")
        epochs = build.training_epochs(recipe, session, train_data)
        write_token_counts(
            context.directory.tokens_path,
            {"train": train_data.ledgers, "eval": eval_data.ledgers},
            epochs,
            train_data.sequences.lengths,
            recipe.train.per_device_train_batch_size,
        )
    with context.phase("loading the model"):
        built = build.with_adapters(build.build_base(recipe, report, session, texts), recipe, report)
        kernels = build.with_kernels(built, recipe, report, train_data.sequences)
        session.reporter.info(kernels.summary())
        if epochs.packs is not None:
            build.check_packing(built, report, epochs, texts)
        add_to_manifest(
            context,
            kernels=kernels.table,
            self_check=kernels.self_check,
            quantization=build.quantization_table(built),
        )
        evaluator = _evaluator(recipe, report, session, texts, built, eval_data)
    keep_inputs(context, build.inputs_of(recipe, report, texts, built, train_data.sequences.digest()))
    summary = fit(
        recipe,
        context,
        texts,
        built,
        lambda hooks, scratch: build_sft_trainer(
            recipe,
            built.model,
            texts.tokenizer,
            epochs,
            report.plan,
            hooks,
            device=built.device,
            scratch_dir=scratch,
            offloaded=build.offloaded_of(report),
        ),
        (lambda: evaluator.loss(built.model)) if recipe.data.eval else None,
    )
    with context.phase("evaluating"):
        final = evaluator.loss(built.model)
        if final:
            context.write_line({"step": summary["steps"], **{f"eval_{name}": value for name, value in final.items()}})
            session.reporter.info(f"held-out loss {final['loss']:.4f}, token accuracy {final['token_accuracy']:.1%}")
        samples = answered_rows(evaluator, built.model) if recipe.data.eval else []
    write_train_evaluation(context.directory, final, samples)
    return {**summary, "eval": final, "seconds": time.perf_counter() - started}


def _evaluator(
    recipe: Recipe,
    report: PreflightReport,
    session: Session,
    texts: build.Texts,
    built: build.Built,
    eval_data: Prepared,
) -> Evaluator:
    from ftcli.evaluate.suite import Evaluator

    return Evaluator(
        recipe, texts.tokenizer, texts.stops, eval_data.sequences, report.plan, built.device, session.reporter
    )
