"""`ftcli export`: a run's result in other formats, each loaded again before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.pipeline.checking import checked
from ftcli.pipeline.weights import checkpoint_of
from ftcli.reporting import Session
from ftcli.run.directory import RunDirectory

if TYPE_CHECKING:
    from ftcli.export.writing import ExportResult


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

    Raises FtcliError as ``export_run``, FT725 when there is no such checkpoint.
    """
    from ftcli.export.writing import export_run

    checked(loaded, session, "export")
    run = RunDirectory(run_dir)
    results = export_run(
        run,
        loaded.recipe.export.formats,
        reporter=session.reporter,
        offline=session.offline,
        checkpoint=checkpoint_of(run, checkpoint, session.reporter),
    )
    return Exported(str(run_dir), results)
