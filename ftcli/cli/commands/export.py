"""`ftcli export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import completion, options
from ftcli.cli.request import AnyRequest, Request
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.exporting import Exported


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_RUN",
            help="A recipe or a run directory.",
            show_default=False,
            autocompletion=completion.runs_and_recipes,
        ),
    ],
    set_: options.SetOption = None,
    checkpoint: options.CheckpointOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Write a run in other formats.

    The formats are those of the recipe's export section; each is loaded again and compared before it counts.

    \b
    Examples:
      ftcli export runs/smoke
      ftcli export runs/smoke --checkpoint 100
      ftcli export recipes/smoke.yaml --set export.formats=[safetensors]
    """

    def action(session: Session) -> Exported:
        from ftcli import pipeline

        loaded, run_dir = options.load_run(target, options.overrides(set_))
        return pipeline.export(loaded, session, run_dir, checkpoint)

    return Request("export", options.common(json, quiet, offline, debug), action)
