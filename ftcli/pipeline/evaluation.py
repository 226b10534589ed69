"""`ftcli eval`: the base model, and a run's result beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.facts.adapters import start_folder
from ftcli.facts.weights import ADAPTER_CONFIG
from ftcli.judges import judges_of
from ftcli.pipeline.weights import measured_otherwise, weights_of
from ftcli.plain import LEFT_OUT
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.run.directory import RunDirectory
from ftcli.run.integrity import hold_asked, hold_start
from ftcli.run.report import write_report
from ftcli.run.report.card import write_card
from ftcli.run.results import Evaluation, MarginsBeforeAndAfter, update_evaluation, write_margins
from ftcli.train.evaluation import eval_scores, margins_record, task_samples

if TYPE_CHECKING:
    from ftcli.data.tokens import TokenizedRow
    from ftcli.evaluate.suite import Evaluator, ModelScores
    from ftcli.job import Job
    from ftcli.train.assembly import KernelReport


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The answer of `ftcli eval`: the base model, the run where one was named, and which of its weights."""

    recipe: str
    base: ModelScores
    run: ModelScores | None = None
    checkpoint: str | None = field(default=None, metadata=LEFT_OUT)
    run_directory: str | None = field(default=None, metadata=LEFT_OUT)


def evaluate_recipe(
    loaded: LoadedRecipe, session: Session, run_dir: Path | None, checkpoint: str | None = None
) -> EvaluationResult:
    """Token-weighted loss, perplexity, token accuracy and tasks; written to the run's eval.json when one is named, but
    not those of a ``checkpoint``, a step or ``best`` that is evaluated in place of the result.

    Raises FtcliError FT763 when ``run_dir`` holds no finished run, FT725 when it has no such checkpoint, FT749 when the
    command line changes how it was trained.
    """
    directory = None if run_dir is None else RunDirectory(run_dir)
    chosen, weights = weights_of(loaded, directory, checkpoint, session.reporter, "an evaluation")
    if directory is not None:
        for finding in measured_otherwise(loaded, directory):
            session.reporter.finding(finding)
    report = checked(loaded, session, "eval")
    from ftcli.job import open_job
    from ftcli.train import data
    from ftcli.train.on_rows import answers_of_other, row_method

    judges = judges_of(report.recipe)
    job, method = open_job(report, session), row_method(report.plan.method)
    rows = data.tokenized(job, "eval").sequences
    asked = answers_of_other(method, job, None, (), rows)
    if asked is not None and directory is not None:
        hold_asked(directory.path, asked.inputs)
    evaluator = method.evaluator(job, rows, judges=judges, reference=None if asked is None else asked.found)
    evaluator.read_tasks()
    start = method.start_of(job.recipe)
    if start is not None and directory is not None:
        hold_start(directory.path, start)
    base, tuned = _base_and_run(job, evaluator, directory, weights, start)
    if directory is None or tuned is None:
        return EvaluationResult(str(loaded.path), base)
    if chosen is not None:
        return EvaluationResult(str(loaded.path), base, tuned, checkpoint=str(chosen))
    _write(directory, base, tuned)
    return EvaluationResult(str(loaded.path), base, tuned, run_directory=str(directory.path))


def _base_and_run(
    job: Job, evaluator: Evaluator, directory: RunDirectory | None, weights: Path | None, start: str | None
) -> tuple[ModelScores, ModelScores | None]:
    """Measures the base model, and the run's ``weights`` where there are any; in place of the base the adapter from
    which these went on, where they are compared with it.
    """
    from ftcli.model.initial_adapters import as_base
    from ftcli.model.lora import compare_with_start, load_adapter
    from ftcli.train.assembly import begin_reading, build_base, hold

    read = None if directory is None else begin_reading(job)
    rows, model = evaluator.sequences, build_base(job)
    if directory is not None:
        hold(job, model, directory, read)
    # An adapter, or what is left of one.
    if weights is not None and ((weights / ADAPTER_CONFIG).is_file() or any(weights.glob("adapter_model*"))):
        adapted = load_adapter(model, weights)
        freeze_on_kernels(job, adapted, rows)
        if start is not None:
            compare_with_start(adapted, start_folder(start))
        with as_base(adapted) if start is not None else adapted.disable_adapter():
            base = evaluator.measure(adapted)
        return base, evaluator.measure(adapted)
    freeze_on_kernels(job, model, rows)
    base = evaluator.measure(model)
    if weights is None:
        return base, None
    del model  # before the second model is loaded: both need not fit
    tuned = build_base(job, weights=weights)
    freeze_on_kernels(job, tuned, rows)
    return base, evaluator.measure(tuned)


def freeze_on_kernels(job: Job, model: Any, rows: Sequence[TokenizedRow]) -> KernelReport:
    """Freezes the model and puts it on the kernels as training does, self-check included; changed in place."""
    from ftcli.train.assembly import laid_out, put_on_kernels
    from ftcli.train.bench import synthetic_tokens

    model.requires_grad_(False)
    report = put_on_kernels(job, model, rows if len(rows) else synthetic_tokens(2, 64, job.vocab_size, 0))
    laid_out(job, model, rows)
    return report


def _write(directory: RunDirectory, base: ModelScores, tuned: ModelScores) -> None:
    measured = Evaluation(eval_scores(base), eval_scores(tuned), task_samples(base.tasks, tuned.tasks))
    write_margins(directory.margins_path, MarginsBeforeAndAfter(margins_record(base.loss), margins_record(tuned.loss)))
    update_evaluation(directory.eval_path, measured)
    write_card(directory)
    write_report(directory)
