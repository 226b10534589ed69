"""Rules of rows that several processes share (``launch.context_parallel_size``)."""

from __future__ import annotations

from ftcli.plan.run import RunPlan
from ftcli.plan.sharding import why_rows_stay_whole
from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import engines

_KEY = "launch.context_parallel_size"


def check(context: Context) -> Findings:
    """FT286, from the recipe alone."""
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
