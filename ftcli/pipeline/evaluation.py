"""`ftcli eval`: the base model, and a run's result beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config import Recipe
from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, FtcliError
from ftcli.judges import judges_of
from ftcli.pipeline.results import scores
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session
from ftcli.run.directory import RunDirectory, is_run_directory
from ftcli.run.report import write_report
from ftcli.run.results import AnsweredRow, Evaluation, write_evaluation

if TYPE_CHECKING:
    from ftcli.data.tokens import Tokens
    from ftcli.evaluate.suite import Evaluator
    from ftcli.pipeline.build import Built, KernelReport


def run(loaded: LoadedRecipe, session: Session, run_dir: Path | None) -> dict[str, Any]:
    """Token-weighted loss, perplexity, token accuracy and tasks; written to the run's eval.json when one is named.

    Raises FtcliError FT763 when ``run_dir`` holds no finished run.
    """
    recipe = loaded.recipe
    directory = None if run_dir is None else _finished_run(run_dir)
    report = preflight(loaded, command="eval", device=None, offline=session.offline)
    for finding in report.findings:
        session.reporter.finding(finding)
    from ftcli.evaluate.suite import Evaluator
    from ftcli.pipeline import build

    functions = judges_of(recipe)
    texts = build.texts_of(recipe, report, session)
    sequences = build.tokenized(recipe, session, texts, "eval").sequences
    device = build.device_of(report)
    evaluator = Evaluator(
        recipe, texts.tokenizer, texts.stops, sequences, report.plan, device, session.reporter, functions
    )
    built = build.build_base(recipe, report, session, texts)
    result: dict[str, Any] = {"recipe": str(loaded.path), "base": None, "run": None}
    if directory is None:
        on_kernels(built, recipe, report, session, sequences)
        result["base"] = _measure(evaluator, built.model)
        return result
    if directory.adapter_dir.is_dir():
        built = build.with_saved_adapter(built, directory.adapter_dir)
        on_kernels(built, recipe, report, session, sequences)
        with built.model.disable_adapter():
            result["base"] = _measure(evaluator, built.model)
        result["run"] = _measure(evaluator, built.model)
    else:
        on_kernels(built, recipe, report, session, sequences)
        result["base"] = _measure(evaluator, built.model)
        del built  # before the second model is loaded: both need not fit
        tuned = build.build_base(recipe, report, session, texts, weights=directory.model_dir)
        on_kernels(tuned, recipe, report, session, sequences)
        result["run"] = _measure(evaluator, tuned.model)
    _write(directory, result)
    return {**result, "run_directory": str(directory.path)}


def on_kernels(
    built: Built, recipe: Recipe, report: PreflightReport, session: Session, sequences: Sequence[Tokens]
) -> KernelReport:
    """Freezes the model and puts it on the kernels as training does, self-check included; changed in place."""
    from ftcli.pipeline import build
    from ftcli.trainers.bench import synthetic_tokens

    built.model.requires_grad_(False)
    rows = sequences if len(sequences) else synthetic_tokens(2, 64, int(report.facts.vocab_size or 256), 0)
    kernels = build.with_kernels(built, recipe, report, rows)
    session.reporter.info(kernels.summary())
    return kernels


def _measure(evaluator: Evaluator, model: Any) -> dict[str, Any]:
    from ftcli.evaluate.loss import combine

    datasets = evaluator.loss_by_dataset(model)
    measured = {**combine(datasets.values()), "datasets": datasets, "tasks": evaluator.tasks(model)}
    harness = evaluator.harness(model)
    return {**measured, "lm_eval": harness} if harness else measured


def _finished_run(run_dir: Path) -> RunDirectory:
    directory = RunDirectory(run_dir)
    if not is_run_directory(run_dir) or not (directory.adapter_dir.is_dir() or directory.model_dir.is_dir()):
        raise FtcliError.single(
            "FT763",
            f"{run_dir} holds no finished run: neither adapter/ nor model/ is there",
            exit_code=ExitCode.RECIPE,
            help="train first, or name the run's directory",
        )
    return directory


def _write(directory: RunDirectory, result: dict[str, Any]) -> None:
    base, tuned = result["base"], result["run"]
    samples = [
        AnsweredRow(b["prompt"], b["reference"], b["completion"], a["completion"], name)
        for name, task in tuned["tasks"].items()
        for b, a in zip(base["tasks"][name]["samples"], task["samples"], strict=True)
    ]
    evaluation = Evaluation(scores(base, base["tasks"]), scores(tuned, tuned["tasks"]), tuple(samples))
    write_evaluation(directory.eval_path, evaluation)
    write_report(directory)
