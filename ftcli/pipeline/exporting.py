"""`ftcli export`: a run's result in other formats, each loaded again before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.dump import dump_recipe
from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.pipeline.checking import checked
from ftcli.pipeline.weights import checkpoint_of
from ftcli.reporting import Session
from ftcli.run.changes import HARMLESS, ChangedKey, recipe_changes
from ftcli.run.directory import RunDirectory

if TYPE_CHECKING:
    from ftcli.export.writing import ExportResult


#: What an export takes from the recipe as it is now; everything else is of the run.
_OF_EXPORT = ("export", "run")


@dataclass(frozen=True, slots=True)
class Exported:
    """What `ftcli export` answers."""

    run: str
    exports: Sequence[ExportResult]


def export_recipe(loaded: LoadedRecipe, session: Session, run_dir: Path, checkpoint: str | None = None) -> Exported:
    """Writes each of ``export.formats`` to ``<run>/export/<format>``.

    Args:
        checkpoint: Of the run, a step or ``best``: it is written in place of the result, below
            ``<run>/export/step-…``.

    Raises FtcliError as ``export_run``, FT725 when there is no such checkpoint, FT749 when the command line changes
    what has been trained.
    """
    from ftcli.export.writing import export_run

    checked(loaded, session, "export")
    run = RunDirectory(run_dir)
    for finding in _as_trained(loaded, run):
        session.reporter.finding(finding)
    results = export_run(
        run,
        loaded.recipe.export.formats,
        reporter=session.reporter,
        offline=session.offline,
        checkpoint=checkpoint_of(run, checkpoint, session.reporter),
    )
    return Exported(str(run_dir), results)


def _as_trained(loaded: LoadedRecipe, run: RunDirectory) -> list[Finding]:
    """FT749, warnings: how the recipe, as it is now, differs from the one that the run was trained by.

    Raises FtcliError FT749 (exit 2) for such values of ``--set``: an export writes what was trained.
    """
    try:
        changes = recipe_changes(run.recipe_path.read_text(encoding="utf-8"), dump_recipe(loaded.recipe))
    except (OSError, ValueError):
        return []  # the export says what is wrong with the run
    asked = [change for change in changes if not change.is_in(_OF_EXPORT)]
    told = [change for change in asked if not change.is_in(HARMLESS)]
    refused = [change for change in asked if _is_set(loaded, change)]
    if refused:
        help = "an export writes what was trained, by the recipe of the run: train again with it, or leave it out"
        found = [
            Finding("FT749", f"an export cannot change {change}", loaded.origins.at(change.key), help)
            for change in refused
        ]
        raise FtcliError(found, ExitCode.RECIPE)
    help = "what was trained is exported; train again to have it otherwise"
    message = "the run was trained by another recipe than this one: "
    return [Finding("FT749", f"{message}{change}", loaded.origins.at(change.key), help, "warning") for change in told]


def _is_set(loaded: LoadedRecipe, change: ChangedKey) -> bool:
    origin = loaded.origins.at(change.key)
    return origin is not None and origin.source.startswith("--set")
