"""`ftcli sweep`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import options
from ftcli.cli.render import clean, table
from ftcli.paths import expanded
from ftcli.reporting import Session
from ftcli.units import number, score

if TYPE_CHECKING:
    from ftcli.pipeline.sweep import SweepResult


def sweep_text(result: SweepResult) -> str:
    """A line for each run, those that failed with their reason, and the best one."""
    best = result.best
    rows = []
    for run in result.runs:
        found = run.summary
        loss = None if found is None else found.loss if found.loss is not None else found.reward
        rows.append(
            {
                "": "*" if best is not None and best["path"] == run.path else "",
                "run": run.name,
                "exit": str(run.exit_code),
                "step": None if found is None else found.step,
                "loss": loss,
                "held-out loss": None if found is None else found.eval_loss,
                **({} if found is None or found.preferred is None else {"in order": f"{found.preferred:.1%}"}),
                **({} if found is None else {name: score(value) for name, value in found.tasks.items()}),
            }
        )
    lines = table(rows)
    lines += [f"{run.name} failed: {clean(run.reason)}" for run in result.runs if run.reason]
    if best is not None:
        lines += ["", f"best: {best['name']}, {best['metric']} {number(best['value'])}"]
    lines += [*([] if best is not None else [""]), *result.remarks]
    if result.html is not None:
        lines.append(f"side by side: {result.html}")
    return "\n".join([*lines, *([f"next: ftcli export {best['path']}"] if best is not None else [])])


@options.command("sweep", sweep_text, exit_code=lambda result: result.exit_code)
def sweep(
    session: Session,
    recipe: options.RecipeArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=V1,V2,...",
            help="Values to try, as in train.learning_rate=1e-4,2e-4; a single value applies to all runs. Repeatable.",
            show_default=False,
        ),
    ] = None,
    output_dir: Annotated[
        str | None, typer.Option("--output-dir", metavar="DIR", help="Where the runs go; runs/NAME by default.")
    ] = None,
    max_steps: options.MaxStepsOption = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            "--gpus", metavar="N|auto", help="Use N GPUs, one for each run; without it, runs come one after another."
        ),
    ] = None,
) -> SweepResult:
    """Try settings, and name the best.

    Makes one run for each combination of the values, each in a process of its own. Runs that are complete are skipped
    and interrupted ones go on, so the same command again continues a sweep. Ends in a comparison.

    \b
    Examples:
      ftcli sweep recipes/smoke.yaml --set train.learning_rate=1e-3,2e-3,5e-3
      ftcli sweep recipes/gemma2-9b.yaml --set train.learning_rate=1e-4,2e-4 --set lora.r=8,32 --gpus auto
    """

    from ftcli.cli import children
    from ftcli.config.grid import combinations
    from ftcli.pipeline import sweep as sweeping

    assignments = [*(set_ or ()), *([f"train.max_steps={max_steps}"] if max_steps is not None else [])]
    grid = combinations(assignments)
    path = options.named(output_dir, "--output-dir")
    plan = sweeping.plan_sweep(expanded(recipe), grid, None if path is None else str(path))
    chosen = children.devices(gpus, os.environ, children.count_gpus)
    start = children.starter(
        str(expanded(recipe)), quiet=session.quiet or len(chosen) > 1, offline=session.offline, debug=session.debug
    )
    return sweeping.sweep(plan, session, start, chosen)
