"""`ftcli grpo`: prompts and rewards in, adapter or model out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftcli.config.load import LoadedRecipe
from ftcli.judges import judges_of
from ftcli.methods.grpo.prompts import training_rows
from ftcli.methods.grpo.settings import GrpoConfig
from ftcli.plain import FLATTENED, NAMED
from ftcli.reporting import Session
from ftcli.run.completions import Completions
from ftcli.train.context import BuiltModel, RunContext
from ftcli.train.evaluation import began_in, tasks_before, write_tasks
from ftcli.train.fit import FinishedRun, fit
from ftcli.train.lifecycle import add_to_manifest, checked_run, keep_inputs
from ftcli.train.results import CompleteRun, complete_result

if TYPE_CHECKING:
    from ftcli.data.asked import RenderedPrompt
    from ftcli.data.tokens import TokenizedRow
    from ftcli.evaluate.suite import Evaluator, TaskResult
    from ftcli.job import Job
    from ftcli.methods.grpo.parity import Parity
    from ftcli.run.process_group import RankGroup
    from ftcli.train import assembly


@dataclass(frozen=True, slots=True)
class LogProbsRecord:
    """What the manifest says of the log-probabilities that a policy is trained on."""

    log_probs: Parity


@dataclass(frozen=True, slots=True)
class GrpoResult:
    """What `ftcli grpo` answers: the run, and the score of each held-out task before and after training."""

    fitted: FinishedRun = field(metadata=FLATTENED)
    before: Mapping[str, float] = field(metadata=NAMED)
    after: Mapping[str, float] = field(metadata=NAMED)
    seconds: float


def train_grpo(loaded: LoadedRecipe, session: Session, group: RankGroup | None = None) -> GrpoResult | CompleteRun:
    """GRPO on the recipe's prompts into its run directory, as one of the ranks of ``group`` where there are several;
    held-out tasks are scored before and after, by rank 0.
    """
    with checked_run(loaded, session, "grpo", group) as context:
        if context is None:
            return complete_result(loaded.recipe, session)
        return _train(session, context)


def _train(session: Session, context: RunContext) -> GrpoResult:
    with context.phase("loading libraries"):
        from ftcli.evaluate.suite import Evaluator
        from ftcli.job import open_job
        from ftcli.methods.grpo.exchange import of_leader
        from ftcli.methods.grpo.objective import build_grpo
        from ftcli.train import assembly

    started, grpo, group = time.perf_counter(), context.recipe.grpo, context.group
    assert grpo is not None  # preflight refuses such a recipe (FT260)
    with context.phase("preparing data"), nullcontext() if group is None else group.after_leader("data"):
        job = open_job(context.report, session)
        prompts = _prompts(job, grpo)
        evaluator = Evaluator(job, [], judges_of(context.recipe))
        evaluator.read_tasks()
    with context.phase("loading the model"):
        read = assembly.begin_reading(job) if context.leads else tuple
        model = _policy(context, job, prompts)
        reference = None
        if job.recipe.lora is None and grpo.beta:  # adapters can be switched off
            reference = assembly.build_reference(job, _as_tokens(job, prompts[: assembly.LOOKED_AT]))
    if context.leads:
        keep_inputs(context, assembly.inputs_of(job, model, read))
    before = _before(context, evaluator, model) if context.leads else {}

    def evaluate(step: int) -> dict[str, float]:
        now = evaluator.tasks(model) if context.leads else {}
        if context.leads:
            write_tasks(context.directory, before, now, step)
        return dict(of_leader(group, "tasks", _scores(now)))

    def agreement(parity: Parity) -> None:
        session.reporter.info(parity.summary())  # of several ranks, each looks at its own first batch
        add_to_manifest(context, LogProbsRecord(parity))

    fitted = fit(
        context,
        job,
        model,
        lambda hooks: build_grpo(job, grpo, model, prompts, hooks, agreement, group, reference),
        evaluate if job.recipe.eval.tasks else None,
        training_rows(context.recipe, len(prompts)),
        grpo.completions_kept,
    )
    after = _tasks(context, evaluator, model, "after") if context.leads else {}
    if context.leads:
        write_tasks(context.directory, before, after)
    if after:
        scores = {f"eval_{name}": score for name, score in _scores(after).items()}
        context.write_line({"step": fitted.summary.steps, **scores})
    return GrpoResult(fitted, _scores(before), _scores(after), time.perf_counter() - started)


def _policy(context: RunContext, job: Job, prompts: Sequence[RenderedPrompt]) -> assembly.Model:
    """The model that learns, on the kernels, with an entry in the manifest; the ranks have met."""
    from ftcli.model.quantized import quantized_layers
    from ftcli.train import assembly
    from ftcli.train.graphed import why_not_graphed

    group = context.group
    with nullcontext() if group is None else group.after_leader("weights", lambda: assembly.to_download(job) > 0):
        model = assembly.build_trainable(job)
    tokens = _as_tokens(job, prompts[: assembly.LOOKED_AT])
    kernels = assembly.put_on_kernels(job, model, tokens)
    batches = assembly.laid_out(job, model, tokens)
    graphs = why_not_graphed(job, model) or "on"
    built = BuiltModel(kernels.table, kernels.self_check, quantized_layers(model), graphs, batches)
    add_to_manifest(context, built)
    if group is not None:
        assembly.form_group(job, group)
    return model


def _before(context: RunContext, evaluator: Evaluator, model: Any) -> Mapping[str, TaskResult]:
    """Scores of the tasks before training: a run that goes on reads those that it wrote, and forgets completions of
    steps that are made again.
    """
    if context.opened.resume_step:
        before = tasks_before(began_in(context.opened))
    else:
        before = _tasks(context, evaluator, model, "before")
        write_tasks(context.directory, before, {})  # for a run that is stopped and goes on
    Completions(context.directory.completions_dir).forget_after(context.opened.resume_step)
    return before


def _prompts(job: Job, grpo: GrpoConfig) -> list[RenderedPrompt]:
    from ftcli.data.asked import asked_rows
    from ftcli.methods.grpo.prompts import require_rollout, room_of_grpo

    data = job.recipe.data
    asked, warnings = asked_rows(data.train, data, job.tokenizer, room_of_grpo(grpo), offline=job.session.offline)
    for warning in warnings:
        job.reporter.finding(warning)
    require_rollout(len(asked), job.recipe)
    return asked


def _as_tokens(job: Job, asked: Sequence[RenderedPrompt]) -> list[TokenizedRow]:
    """Prompts as rows that a model can be checked on."""
    from ftcli.data.tokens import TokenizedRow

    encoded = job.tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
    return [TokenizedRow(one.prompt.row, ids, ids) for one, ids in zip(asked, encoded, strict=True)]


def _tasks(context: RunContext, evaluator: Evaluator, model: Any, when: str) -> dict[str, TaskResult]:
    with context.phase("evaluating"):
        found = evaluator.tasks(model)
    for name, score in _scores(found).items():
        context.session.reporter.info(f"held-out {name} {when} training: {score:.1%}")
    return found


def _scores(tasks: Mapping[str, TaskResult]) -> dict[str, float]:
    return {name: task.score for name, task in tasks.items()}
