"""`ftcli check`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import completion, options, samples, views
from ftcli.cli.environment import style_for
from ftcli.cli.render import terminal_text
from ftcli.cli.request import AnyRequest, Invocation
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.checking import CheckResult


def check(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    as_gpu: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="GPU",
            help="Answer for another machine: t4, l4, a10, rtx4090, a100-40gb, a100-80gb, h100, h200, b200 or cpu.",
            autocompletion=completion.gpus,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus", metavar="N", min=1, help="Answer for N of them (launch.num_processes)."),
    ] = None,
    show_sample: Annotated[
        int,
        typer.Option(
            "--show-sample",
            metavar="N",
            min=0,
            max=1_000_000,
            help="Show N rows of each training source as tokens: what is trained, what is masked.",
        ),
    ] = 0,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Say whether a recipe can work here.

    Looks at keys, model, data, GPU, memory and disk. Downloads no weights and builds nothing.

    \b
    Examples:
      ftcli check recipes/gemma2-9b.yaml
      ftcli check recipes/gemma2-9b.yaml --as h100 --offline
      ftcli check recipes/llama3.1-8b.yaml --as h100 --gpus 8
      ftcli check recipes/smoke.yaml --show-sample 3
    """

    def action(session: Session) -> CheckResult:
        from ftcli import pipeline

        changes = options.overrides(set_, gpus=gpus)
        return pipeline.check(options.load(recipe, changes), session, as_gpu, show_sample)

    def render(result: CheckResult) -> str:
        shown = samples.samples_text(result.samples, style_for(sys.stdout))
        return "\n\n".join(part for part in (terminal_text(views.check_text(result)), shown) if part)

    return Invocation("check", options.common(json, quiet, offline, debug), action, render, verbatim=True)
