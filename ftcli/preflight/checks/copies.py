"""Rules of copies of weights that are sharded (``launch.dp_replicate_size``)."""

from __future__ import annotations

from ftcli.preflight.checks.context import Context, Findings
from ftcli.tables import engines

_KEY = "launch.dp_replicate_size"


def check(context: Context) -> Findings:
    """FT287, from the recipe alone."""
    launch = context.recipe.launch
    copies, processes = launch.copies, launch.num_processes
    if copies == 1 or context.work != "train":
        return
    if launch.engine != engines.AUTO and not engines.row(launch.engine).shards:
        yield context.error(
            "FT287",
            _KEY,
            f"{_KEY} {copies}: under launch.engine: {launch.engine} every process has a copy of the model",
            help=f"use launch.engine: {engines.by_auto(shards=True)}, or remove {_KEY}",
        )
    fitting = [str(n) for n in range(2, processes // 2 + 1) if processes % n == 0]
    if str(copies) not in fitting:
        yield context.error(
            "FT287",
            _KEY,
            f"{_KEY} {copies} needs launch.num_processes divisible by {copies} and at least {2 * copies}; it is "
            f"{processes}",
            help=f"use {_KEY}: {' or '.join(fitting)}" if fitting else f"start at least {2 * copies} processes",
        )
