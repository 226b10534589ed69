"""`ftcli export`: a run's result in other formats, each loaded again before it counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.errors import Finding, FtcliError
from ftcli.pipeline.weights import changed_since, checkpoint_of, refuse_settings
from ftcli.preflight.stages import checked
from ftcli.reporting import Session
from ftcli.run.directory import RunDirectory
from ftcli.run.recipe_changes import HARMLESS

if TYPE_CHECKING:
    from ftcli.export.writing import ExportResult


#: What an export takes from the recipe as it is now; everything else is of the run.
_OF_EXPORT = ("export", "run")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export: a ``checkpoint`` (a step or ``best``) in place of the result, written below
    ``<run>/export/step-…``; the folder in place of ``<run>/export``; whether an earlier export of something else is
    replaced and what is written held against what was trained; and the repository on the Hub to upload to.
    """

    checkpoint: str | None = None
    output: Path | None = None
    force: bool = False
    verify: bool = True
    repo: str | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """The answer of `ftcli export`."""

    run: str
    exports: Sequence[ExportResult]


def export_recipe(loaded: LoadedRecipe, session: Session, run_dir: Path, choices: ExportOptions) -> Exported:
    """Writes each of ``export.formats`` to ``<run>/export/<format>``.

    Raises FtcliError as ``export_run``, FT725 when there is no such checkpoint, FT749 when the command line changes
    what has been trained, FT755 for a repository that cannot be uploaded to.
    """
    _require_uploadable(session, choices)
    from ftcli.export.writing import export_run, push

    checked(loaded, session, "export")
    run = RunDirectory(run_dir)
    for finding in _as_trained(loaded, run):
        session.reporter.finding(finding)
    results = export_run(
        run,
        loaded.recipe.export.formats,
        reporter=session.reporter,
        offline=session.offline,
        destination=choices.output,
        checkpoint=checkpoint_of(run, choices.checkpoint, session.reporter),
        force=choices.force,
        verify=choices.verify,
        settings=loaded.recipe.export,
    )
    if choices.repo is not None:
        session.reporter.info(f"uploaded to {push(results, choices.repo)}")
    return Exported(str(run_dir), results)


def _require_uploadable(session: Session, choices: ExportOptions) -> None:
    """Raises FtcliError FT755 (exit 2) before anything is written that could not be uploaded."""
    if choices.repo is None:
        return
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    reason, help = "", "leave one of them out"
    if session.offline or not choices.verify:
        reason = "--offline leaves no way to the Hub" if session.offline else "only what was verified is uploaded"
    name, at, branch = choices.repo.partition("@")
    try:
        validate_repo_id(name)
        if at and not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)*", branch):
            raise HFValidationError(branch)
    except HFValidationError:
        reason = "that is no name of a repository on the Hub, or of a branch of one"
        help = "name it NAMESPACE/NAME, or NAME for your own; NAME@BRANCH commits to a branch"
    if reason:
        raise FtcliError.single("FT755", f"--push-to-hub {choices.repo}: {reason}", help=help)


def _as_trained(loaded: LoadedRecipe, run: RunDirectory) -> list[Finding]:
    """FT749, warnings: how the recipe, as it is now, differs from the one that the run was trained by.

    Raises FtcliError FT749 (exit 2) for such values of ``--set``: an export writes what was trained.
    """
    asked = [change for change in changed_since(loaded, run) if not change.is_in(_OF_EXPORT)]
    refuse_settings(loaded, asked, "an export")
    told = [change for change in asked if not change.is_in(HARMLESS)]
    help = "what was trained is exported; train again to change it"
    message = "the run was trained by another recipe than this one: "
    return [Finding("FT749", f"{message}{change}", loaded.origins.at(change.key), help, "warning") for change in told]
