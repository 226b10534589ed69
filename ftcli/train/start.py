"""The summary of a run before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.preflight.checks.optimisation import long_warm_ups
from ftcli.tables import quantizations
from ftcli.train.context import RunContext

if TYPE_CHECKING:
    from ftcli.job import Job


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The training data: ``count`` ``rows``, ``prompts`` or ``pairs``, how many tokens they have, if that is known, and
    what a step takes of them.

    Attributes:
        batch: What a step of the optimizer learns from, ``packed rows`` or ``completions``; None: ``unit``.
        more: What else is to be said of the batch, after it.
    """

    count: int
    unit: str
    tokens: int | None = None
    batch: str | None = None
    more: str = ""


def tell_start(context: RunContext, job: Job, model: Any, rows: TrainingRows) -> None:
    """Tells what is trained on what, where it goes, and how to stop it."""
    tokens = "" if rows.tokens is None else f" of {rows.tokens:,} tokens"
    path = context.directory.path
    lines = (
        ("parameters", trained_share(job, model)),
        ("data", f"{rows.count:,} {rows.unit}{tokens}"),
        ("batch", effective_batch(context.recipe, rows)),
        ("run", f"{path}; {context.directory.report_path.name} in it shows how it goes"),
        ("Ctrl-C", "once finishes the step and writes a checkpoint, twice stops at once"),
    )
    width = max(len(name) for name, _ in lines)
    context.session.reporter.info("\n".join(f"{name:<{width}}  {text}" for name, text in lines))


def tell_warm_ups(context: RunContext, steps: int) -> None:
    """Warns of warm-ups that last as long as training, whose length follows from the data. Where the recipe says it
    (``train.max_steps``), preflight has told already.
    """
    if context.recipe.train.max_steps is not None or not context.leads:
        return
    for _, problem, remedy in long_warm_ups(context.recipe, steps, f"the {steps:,} steps of this run"):
        context.session.reporter.finding(Finding("FT268", problem, help=remedy, severity="warning"))


def trained_share(job: Job, model: Any) -> str:
    """Text on the number of trained parameters, of all. A quantized layer holds several in one element."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if quantizations.row(job.recipe.quantization.method).quantize is None:
        total: int | None = sum(p.numel() for p in model.parameters())
    else:
        base = job.facts.parameters
        total = None if base is None else base + (count if job.recipe.lora is not None else 0)
    share = "" if not total else f" of {total:,} ({count / total:.2%})"
    return f"{count:,}{share} are trained"


def effective_batch(recipe: Recipe, rows: TrainingRows) -> str:
    """The effective batch: what one step of the optimizer learns from."""
    size, accumulated = recipe.train.per_device_train_batch_size, recipe.train.gradient_accumulation_steps
    ranks, shared = recipe.launch.row_shares, recipe.launch.context_parallel_size
    parts = f"{size} at a time x {accumulated} accumulated"
    if ranks > 1:
        parts += f" x {ranks} {'processes' if shared == 1 else 'teams'}"
    if shared > 1:
        parts += f", each row on {shared} processes"
    return f"{size * accumulated * ranks:,} {rows.batch or rows.unit} a step ({parts}){rows.more}"
