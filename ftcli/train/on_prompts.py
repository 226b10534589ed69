"""Runs on prompts that the model answers itself: recipe in, adapter or model out, whichever method learns from them."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.data.asked import PromptLimit
from ftcli.plain import FLATTENED, NAMED
from ftcli.reporting import Session
from ftcli.run.completions import Completions
from ftcli.train.context import BuiltModel, RunContext
from ftcli.train.evaluation import began_in, tasks_before, write_tasks
from ftcli.train.fit import FinishedRun, fit
from ftcli.train.lifecycle import CompleteRun, add_to_manifest, checked_run, complete_result, keep_inputs
from ftcli.train.progress import TrainingRows
from ftcli.units import score

if TYPE_CHECKING:
    from ftcli.data.asked import RenderedPrompt
    from ftcli.data.tokens import TokenizedRow
    from ftcli.evaluate.suite import Evaluator, TaskResult
    from ftcli.job import Job
    from ftcli.run.inputs import Inputs
    from ftcli.run.process_group import RankGroup
    from ftcli.train import assembly
    from ftcli.train.loop import TrainerHooks, TrainingLoop


@dataclass(frozen=True, slots=True)
class PromptsResult:
    """The answer of such a command: the run, and the score of each held-out task before and after training."""

    fitted: FinishedRun = field(metadata=FLATTENED)
    before: Mapping[str, float] = field(metadata=NAMED)
    after: Mapping[str, float] = field(metadata=NAMED)
    seconds: float


class PromptMethod(ABC):
    """A method's part of a run on prompts."""

    #: The command that trains with it.
    command: ClassVar[str]
    #: Logging steps whose completions are kept.
    kept: int = 0

    @abstractmethod
    def room(self, recipe: Recipe) -> PromptLimit:
        """How long a prompt may be."""

    @abstractmethod
    def training_rows(self, recipe: Recipe, prompts: int) -> TrainingRows:
        """The training rows of a run of so many prompts, for the summary at its start."""

    @abstractmethod
    def prepare(self, job: Job, prompts: Sequence[RenderedPrompt]) -> None:
        """Opens what the method needs before a model is loaded. Raises FtcliError where it cannot."""

    @abstractmethod
    def load_other(self, job: Job, rows: Sequence[TokenizedRow], group: RankGroup | None) -> Inputs | None:
        """Loads a second model, where the method has one; gives the identity of its files where they are not those of
        the trained one.

        Args:
            rows: A few prompts, on which it can be checked.
        """

    @abstractmethod
    def build(
        self,
        context: RunContext,
        job: Job,
        model: Any,
        prompts: Sequence[RenderedPrompt],
        hooks: TrainerHooks,
        group: RankGroup | None,
    ) -> TrainingLoop:
        """The loop that trains ``model``."""


def train_on_prompts(
    loaded: LoadedRecipe, session: Session, method: PromptMethod, group: RankGroup | None
) -> PromptsResult | CompleteRun:
    """Trains on the recipe's prompts into its run directory, as one of the ranks of ``group`` where there are several;
    held-out tasks are scored before and after, by rank 0.
    """
    with checked_run(loaded, session, method.command, group) as context:
        if context is None:
            return complete_result(loaded.recipe, session)
        return _train(session, context, method)


def _train(session: Session, context: RunContext, method: PromptMethod) -> PromptsResult:
    with context.phase("loading libraries"):
        from ftcli.evaluate.suite import Evaluator
        from ftcli.job import open_job
        from ftcli.judges import judges_of
        from ftcli.run.process_group import of_leader
        from ftcli.train import assembly

    started, group = time.perf_counter(), context.group
    with context.phase("preparing data"), nullcontext() if group is None else group.after_leader("data"):
        job = open_job(context.report, session)
        prompts = _prompts(job, method)
        method.prepare(job, prompts)
        evaluator = Evaluator(job, [], judges_of(context.recipe))
        evaluator.read_tasks()
    with context.phase("loading the model"):
        read = assembly.begin_reading(job) if context.leads else tuple
        model = _policy(context, job, prompts)
        other = method.load_other(job, _as_tokens(job, prompts[: assembly.LOOKED_AT]), group)
    if context.leads:
        inputs = assembly.inputs_of(job, model, read, images_digest(prompts))
        keep_inputs(context, inputs if other is None else replace(inputs, asked=other))
    before = _before(context, evaluator, model)

    def evaluate(step: int) -> dict[str, float]:
        now = _tasks(context, evaluator, model)
        if context.leads:
            write_tasks(context.directory, before, now, step)
        return dict(of_leader(group, "tasks", _scores(now)))

    fitted = fit(
        context,
        job,
        model,
        lambda hooks: method.build(context, job, model, prompts, hooks, group),
        evaluate if job.recipe.eval.tasks else None,
        method.training_rows(context.recipe, len(prompts)),
        method.kept,
    )
    after = _told(context, evaluator, model, "after")
    if context.leads:
        write_tasks(context.directory, before, after)
    if after:
        scores = {f"eval_{name}": score for name, score in _scores(after).items()}
        context.write_line({"step": fitted.summary.steps, **scores})
    return PromptsResult(fitted, _scores(before), _scores(after), time.perf_counter() - started)


def _policy(context: RunContext, job: Job, prompts: Sequence[RenderedPrompt]) -> assembly.Model:
    """The model that learns, on the kernels, with an entry in the manifest; the ranks have met."""
    from ftcli.model.experts import quantized_stacks
    from ftcli.model.quantized import quantized_layers
    from ftcli.train import assembly
    from ftcli.train.build import why_not_graphed

    group = context.group
    with nullcontext() if group is None else group.after_leader("weights", lambda: assembly.to_download(job) > 0):
        model = assembly.build_trainable(job)
    tokens = _as_tokens(job, prompts[: assembly.LOOKED_AT])
    kernels = assembly.put_on_kernels(job, model, tokens)
    batches = assembly.laid_out(job, model, tokens)
    graphs = why_not_graphed(job, model) or "on"
    built = BuiltModel(
        kernels.table, kernels.self_check, [*quantized_layers(model), *quantized_stacks(model)], graphs, batches
    )
    add_to_manifest(context, built)
    if group is not None:
        assembly.form_group(job, group)
        assembly.shard_weights(job, model, group)
    return model


def _before(context: RunContext, evaluator: Evaluator, model: Any) -> Mapping[str, TaskResult]:
    """Scores of the tasks before training: a resumed run reads those that it wrote, and forgets completions of
    steps that are made again.
    """
    before: Mapping[str, TaskResult] = {}
    if not context.opened.resume_step:
        before = _told(context, evaluator, model, "before")
    elif context.leads:
        before = tasks_before(began_in(context.opened))
    if context.leads:
        if not context.opened.resume_step:
            write_tasks(context.directory, before, {})  # for a run that is stopped and goes on
        Completions(context.directory.completions_dir).forget_after(context.opened.resume_step)
    return before


def _prompts(job: Job, method: PromptMethod) -> list[RenderedPrompt]:
    from ftcli.data.asked import asked_rows

    data = job.recipe.data
    asked, warnings = asked_rows(
        data.train, data, job.tokenizer, method.room(job.recipe), offline=job.session.offline, vision=job.vision
    )
    for warning in warnings:
        job.reporter.finding(warning)
    return asked


def images_digest(prompts: Sequence[RenderedPrompt]) -> str | None:
    """SHA-256 of what the prompts' images hold, which is in no file of rows where they are named by a path; None where
    there are none.
    """
    found = "".join(image.content_digest for one in prompts for image in one.images)
    return hashlib.sha256(found.encode()).hexdigest() if found else None


def _as_tokens(job: Job, asked: Sequence[RenderedPrompt]) -> list[TokenizedRow]:
    """Prompts as rows that a model can be checked on."""
    from ftcli.data.tokens import TokenizedRow

    encoded = job.tokenizer([one.text for one in asked], add_special_tokens=False)["input_ids"]
    return [TokenizedRow(one.prompt.row, ids, ids) for one, ids in zip(asked, encoded, strict=True)]


def _told(context: RunContext, evaluator: Evaluator, model: Any, when: str) -> Mapping[str, TaskResult]:
    with context.phase("evaluating"):
        found = _tasks(context, evaluator, model)
    for name, value in _scores(found).items():
        context.session.reporter.info(f"held-out {name} {when} training: {score(value)}")
    return found


def _tasks(context: RunContext, evaluator: Evaluator, model: Any) -> Mapping[str, TaskResult]:
    """Rank 0's results; none on the others, which take part if they hold shards of the weights."""
    from ftcli.generation.generator import generating

    if not context.recipe.eval.tasks:
        return {}
    memory = context.report.memory
    whole = memory is not None and memory.generator == "whole"
    return generating(context.group, model, evaluator.tasks if context.leads else None, whole=whole) or {}


def _scores(tasks: Mapping[str, TaskResult]) -> dict[str, float]:
    return {name: task.score for name, task in tasks.items()}
