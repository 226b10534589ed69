"""`ftcli export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.exporting import Exported


@options.command("export")
def export(
    session: Session,
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_RUN",
            help="A recipe or a run directory.",
            show_default=False,
            autocompletion=names.runs_and_recipes,
        ),
    ],
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format", metavar="F", help="A format, in place of the recipe's. Repeatable.", show_default=False
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="DIR", help="Write into this folder, not the run's export/.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export of something else.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare it with what was trained; the record says so.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub", metavar="REPO", help="Upload what was verified (REPO@BRANCH); a new repository is private."
        ),
    ] = None,
    set_: options.SetOption = None,
    checkpoint: options.CheckpointOption = None,
) -> Exported:
    """Write a run in other formats.

    The formats are those of the recipe's export section; each is loaded again and compared before it counts.

    \b
    Examples:
      ftcli export runs/smoke
      ftcli export runs/smoke --checkpoint 100
      ftcli export recipes/smoke.yaml --format gguf --format ollama
    """

    from ftcli.run.signals import stoppable

    loaded, run_dir = options.load_run(target, options.overrides(set_, formats=formats))
    folder = options.named(output, "--output")
    with stoppable("exporting"):
        from ftcli.pipeline.exporting import ExportOptions, export_recipe

        chosen = ExportOptions(checkpoint, folder, force, not no_verify, push_to_hub)
        return export_recipe(loaded, session, run_dir, chosen)
