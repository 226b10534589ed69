"""Rules of the section `launch`: rows that ranks share, and copies of sharded weights."""

from __future__ import annotations

from ftcli.plan.execution import why_rows_stay_whole
from ftcli.plan.run import RunPlan
from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import engines

_KEY = "launch.context_parallel_size"
_COPIES = "launch.dp_replicate_size"


def check(context: Context) -> Findings:
    """FT286 and FT287, from the recipe alone."""
    yield from _shared_rows(context)
    yield from _copies(context)


def _shared_rows(context: Context) -> Findings:
    """FT286 for ``launch.context_parallel_size``."""
    launch, train = context.recipe.launch, context.recipe.train
    parts, processes = launch.context_parallel_size, launch.num_processes
    if parts == 1 or context.work != "train":
        return
    if processes % parts:
        fitting = [str(n) for n in range(2, processes + 1) if processes % n == 0]
        yield context.error(
            "FT286",
            _KEY,
            f"{_KEY} {parts} does not divide launch.num_processes {processes}",
            help=f"use {_KEY}: {' or '.join(fitting)}" if fitting else f"start {parts} processes: --gpus {parts}",
        )
    if engines.row(launch.engine).processes == 1:
        yield context.error(
            "FT286",
            _KEY,
            f"{_KEY} {parts} is not supported with launch.engine: {launch.engine}",
            help=f"use {' or '.join(engines.of_several())}",
        )
    if train.neftune_noise_alpha is not None:
        yield context.error(
            "FT286",
            "train.neftune_noise_alpha",
            f"train.neftune_noise_alpha needs whole rows, which {_KEY} {parts} splits",
            help="remove one of the two",
        )


def check_model(context: Context, plan: RunPlan) -> Findings:
    """FT345: the model or what computes it does not allow it."""
    parts = plan.shares
    if parts == 1:
        return
    reason = why_rows_stay_whole(plan.facts, plan.execution, parts)
    if reason is not None:
        yield context.error(
            "FT345",
            _KEY,
            f"{_KEY} {parts}: this model does not support context parallelism: {reason}",
            help=f"remove {_KEY}; a longer row fits with train.gradient_checkpointing: offload",
        )


def _copies(context: Context) -> Findings:
    """FT287 for ``launch.dp_replicate_size``."""
    launch = context.recipe.launch
    copies, processes = launch.copies, launch.num_processes
    if copies == 1 or context.work != "train":
        return
    if launch.engine != engines.AUTO and not engines.row(launch.engine).shards:
        yield context.error(
            "FT287",
            _COPIES,
            f"{_COPIES} {copies}: under launch.engine: {launch.engine} every process has a copy of the model",
            help=f"use launch.engine: {engines.by_auto(shards=True)}, or remove {_COPIES}",
        )
    fitting = [str(n) for n in range(2, processes // 2 + 1) if processes % n == 0]
    if str(copies) not in fitting:
        yield context.error(
            "FT287",
            _COPIES,
            f"{_COPIES} {copies} needs launch.num_processes divisible by {copies} and at least {2 * copies}; it is "
            f"{processes}",
            help=f"use {_COPIES}: {' or '.join(fitting)}" if fitting else f"start at least {2 * copies} processes",
        )
