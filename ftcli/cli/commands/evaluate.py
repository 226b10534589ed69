"""`ftcli eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import completion, options, views
from ftcli.cli.request import AnyRequest, Invocation
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.evaluation import EvaluationResult


def evaluate(
    recipe: options.RecipeArgument,
    set_: options.SetOption = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="A finished run, compared with its base model.",
            autocompletion=completion.run_folders,
        ),
    ] = None,
    checkpoint: options.CheckpointOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Evaluate the base model, or a run beside it.

    Loss, perplexity, token accuracy and the tasks of the recipe on held-out data.

    \b
    Examples:
      ftcli eval recipes/smoke.yaml
      ftcli eval recipes/smoke.yaml --run runs/smoke --json
      ftcli eval recipes/smoke.yaml --run runs/smoke --checkpoint best
    """

    def action(session: Session) -> EvaluationResult:
        from ftcli import pipeline

        loaded = options.load(recipe, options.overrides(set_))
        run_dir = options.run_directory(run, "--run") if run is not None else None
        if checkpoint is not None and run_dir is None:
            raise options.without_run(checkpoint)
        return pipeline.evaluate(loaded, session, run_dir, checkpoint)

    return Invocation("eval", options.common(json, quiet, offline, debug), action, views.evaluation_text)
