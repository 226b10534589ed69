"""Decides how a run starts in its directory: anew, resumed from a checkpoint, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ftcli.config.training import names_checkpoint
from ftcli.errors import ExitCode, Finding, FtcliError, Origin
from ftcli.paths import make_folder
from ftcli.run import atomic
from ftcli.run import status as run_status
from ftcli.run.checkpoint import damage, step_of
from ftcli.run.directory import (
    LOCK_NAME,
    DirectoryLock,
    RunDirectory,
    holds_run,
    is_run_directory,
    no_run,
    unreadable_file,
)
from ftcli.run.integrity import changed_result, result_files
from ftcli.run.recipe_changes import ChangedKey, matters, recipe_changes, structural_keys
from ftcli.run.status import FinishedTraining, TrainingSummary

_SHOWN = 12
_ANEW = "to start a new one, use --resume never, which keeps the old run beside it, or another --output-dir"


@dataclass(slots=True)
class OpenedRun:
    """A run directory that this process owns until :meth:`close` (or the end of a ``with`` block).

    ``resume_from``: the checkpoint to continue from, compared whole (None: from step 0); ``already_complete``: the
    finished run of this very recipe is there, and nothing was changed; ``trained``: only the evaluation after training
    is left to do.
    """

    directory: RunDirectory
    resume_from: Path | None = None
    already_complete: bool = False
    trained: FinishedTraining | None = None
    warnings: tuple[Finding, ...] = ()
    _lock: DirectoryLock | None = field(default=None, repr=False)

    @property
    def resume_step(self) -> int:
        """The step that this process starts after: the last one when all is trained, 0 when the run starts anew."""
        if self.trained is not None:
            return self.trained.steps
        return 0 if self.resume_from is None else step_of(self.resume_from) or 0

    def note_trained(self, summary: TrainingSummary) -> None:
        """Write that training is over, and what its result consists of. Raises FtcliError FT723 or FT724 when
        status.json cannot be written.
        """
        result = self.directory.result_dir
        if result is None:
            raise ValueError(f"{self.directory.path} has no result yet")
        with atomic.storage_errors(result):
            kept = FinishedTraining(summary, summary.steps, result.name, result_files(result))
        run_status.note_trained(self.directory.status_path, kept)

    def finish(self, exit_code: int, *, message: str | None = None, resumable: bool | None = None) -> None:
        """Write the end into status.json (see :func:`ftcli.run.status.write_end`)."""
        run_status.write_end(self.directory.status_path, exit_code, message=message, resumable=resumable)

    def close(self) -> None:
        """Give the directory back; calling it again does nothing."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> OpenedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: Path, resume: str, recipe_yaml: str, command: str = "train") -> OpenedRun:
    """Start, continue or refuse a run in ``path``, which is made when it is missing.

    ``resume``: ``auto`` continues an unfinished run of the same recipe from its newest usable checkpoint, or from the
    start when it has none; a finished run is reported as complete. ``never`` renames an existing run to
    ``<path>.previous-N``. Anything else is the path of a checkpoint, or of a run, whose newest checkpoint is then
    meant: the recipe goes on from there within the checkpoint's own run, whose later checkpoints are renamed, or in a
    ``path`` that is new. A run goes on by the ``command`` that it was begun with.

    On return recipe.yaml is written, status.json says ``running`` (unless the run is complete already), what a crash
    left behind is gone, and the directory is locked for this process.

    Raises FtcliError FT720 in use by another process, FT721 changed recipe (old and new value of every key) or another
    command, FT722 a folder that is no run directory, FT723 not writable, FT724 disk full, FT725 the named checkpoint is
    unusable, FT727 the run's own recipe is not readable.
    """
    run = RunDirectory(Path(path))
    lock = _locked(run)
    try:
        if resume == "never" and holds_run(run):
            lock = _start_beside(run, lock)
        opened = _open_locked(run, resume, recipe_yaml, command)
    except BaseException:
        lock.release()
        raise
    if not lock.supported:
        message = f"the file system of {run.path} has no locks: nothing prevents a second run in this directory"
        opened.warnings = (*opened.warnings, Finding("FT729", message, severity="warning"))
    opened._lock = lock
    return opened


def _open_locked(run: RunDirectory, resume: str, recipe_yaml: str, command: str) -> OpenedRun:
    run.checkpoints.clean()
    if names_checkpoint(resume):
        opened = _continue_from(run, Path(resume), recipe_yaml, command)
    else:
        opened = _continue_own(run, recipe_yaml, command) if holds_run(run) else OpenedRun(run)
    if opened.already_complete:
        return opened
    with atomic.storage_errors(run.path):
        for leftover in sorted(run.path.iterdir()):  # of a crash
            if leftover.name.startswith((atomic.TEMPORARY_PREFIX, atomic.TRASH_PREFIX, atomic.WRITING_PREFIX)):
                atomic.delete(leftover)
        run.checkpoints_dir.mkdir(exist_ok=True)
        atomic.write_text(run.recipe_path, recipe_yaml)
        atomic.fsync_directory(run.path.parent)  # a power cut must not take the whole folder with it
    continues = opened.resume_from is not None or opened.trained is not None
    earlier = run_status.seconds_until_now(run.status_path, run.metrics_path) if continues else 0.0
    run_status.begin(run.status_path, resumed_from=opened.resume_from, trained=opened.trained, earlier_seconds=earlier)
    return opened


def _continue_own(run: RunDirectory, recipe_yaml: str, command: str) -> OpenedRun:
    changes = tuple(c for c in _changes(run, recipe_yaml) if matters(c, command))
    other = _other_command(run, command)
    if (changes or other) and not _has_begun(run):
        return OpenedRun(run)  # a run that was refused before its first step: whatever was changed since is the remedy
    if other is not None:
        raise _made_by(run, other, command)
    if changes:
        raise _changed(run, changes)
    status = run_status.read_status(run.status_path)
    damaged = None if status is None or status.trained is None else changed_result(run, status.trained)
    told = []
    if damaged is not None:
        message = f"the result in {run.path} is not what training wrote: {damaged}"
        help = "--resume never trains again, and keeps the old run beside it"
        told.append(Finding("FT771", message, help=help, severity="warning"))
    if status is not None and status.state == "completed" and run.result_dir is not None:
        return OpenedRun(run, already_complete=True, warnings=tuple(told))
    if status is not None and status.trained is not None and damaged is None:
        return OpenedRun(run, trained=status.trained)
    scan = run.checkpoints.newest_sound()
    source = scan.newest
    warnings = [*told, *scan.warnings]
    if source is None and status is not None and status.resumed_from is not None:
        # It was started from another run's checkpoint and stopped before its first own one.
        earlier = Path(status.resumed_from)
        source = earlier if damage(earlier, thorough=True) is None else None
        if source is None:
            raise _unusable(earlier, "this run was started from it and has no checkpoint of its own yet")
    if source is None and scan.damaged:
        message = f"no checkpoint of {run.path} is usable: the run starts again from its first step"
        warnings.append(Finding("FT733", message, severity="warning"))
    return OpenedRun(run, source, warnings=tuple(warnings))


def _has_begun(run: RunDirectory) -> bool:
    """True if anything has been trained here: there is a line of metrics, a checkpoint, or a result.

    A run that was started from another one's checkpoint has that one's steps.
    """
    status = run_status.read_status(run.status_path)
    if status is None or status.resumed_from is not None or run.result_dir is not None:
        return True
    logged = run.metrics_path.is_file() and run.metrics_path.stat().st_size > 0
    return logged or any(run.checkpoints_dir.glob("step-*"))


def _continue_from(run: RunDirectory, named: Path, recipe_yaml: str, command: str) -> OpenedRun:
    source = _checkpoint_at(named)
    owner = RunDirectory(source.resolve().parent.parent)
    own = owner.path == run.path.resolve()
    if holds_run(run) and not own:
        message = f"{run.path} already holds a run, and {named} belongs to another one"
        help = "choose a new --output-dir, or use --resume auto to continue the run that is there"
        raise FtcliError.single("FT722", message, help=help)
    other = _other_command(owner, command)
    if other is not None:
        raise _made_by(owner, other, command)
    changes = tuple(c for c in _changes(owner, recipe_yaml) if matters(c, command)) if holds_run(owner) else ()
    structural = tuple(c for c in changes if c.is_in(structural_keys()))
    if structural:
        raise _changed(owner, structural)
    warnings = [
        Finding("FT732", f"{source} was trained with another setting: {change}", severity="warning")
        for change in changes
    ]
    if own:
        warnings += [
            Finding("FT730", f"the run goes back to an earlier step; {moved} is set aside", severity="warning")
            for moved in run.checkpoints.set_aside_after(step_of(source) or 0)
        ]
    return OpenedRun(run, source, warnings=tuple(warnings))


def _checkpoint_at(named: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest one of a run directory."""
    if is_run_directory(named):
        newest = RunDirectory(named).checkpoints.newest_sound().newest  # read and compared whole by now
        if newest is None:
            raise _unusable(named, "this run has no complete checkpoint")
        return newest
    if not named.is_dir():
        raise _unusable(named, "there is no such folder")
    if step_of(named) is None:
        raise _unusable(named, "its name is not of the form step-00000100")
    reason = damage(named, thorough=True)
    if reason is not None:
        raise _unusable(named, reason)
    return named


def _locked(run: RunDirectory) -> DirectoryLock:
    """Make the folder where it is missing, refuse one that is something else, and lock it."""
    with atomic.storage_errors(run.path):
        if run.path.exists() and not run.path.is_dir():
            raise no_run(run.path, "it is a file")
        make_folder(run.path)
        foreign = [] if holds_run(run) else _foreign_entries(run.path)
    if foreign:
        raise no_run(run.path, f"it holds other things, such as {foreign[0]}")
    try:
        return DirectoryLock(run.path)
    except OSError as error:
        raise atomic.storage_error(error, run.path / LOCK_NAME) from error


def _start_beside(run: RunDirectory, lock: DirectoryLock) -> DirectoryLock:
    """Rename the old run; the lock on it is held until the new directory has its own."""
    with atomic.storage_errors(run.path):
        atomic.rename_directory(run.path, atomic.first_free(f"{run.path.name}.previous-{{n}}", run.path.parent))
    fresh = _locked(run)
    lock.release()
    return fresh


def _foreign_entries(path: Path) -> list[str]:
    """Names of files and folders that no run has put there, not even one that died in its first moments."""
    ours = {LOCK_NAME, "checkpoints", "run.log"}  # the last is where people send what a run prints
    names = (entry.name for entry in path.iterdir())
    return sorted(name for name in names if name not in ours and not name.startswith(atomic.TEMPORARY_PREFIX))


def _changes(run: RunDirectory, recipe_yaml: str) -> tuple[ChangedKey, ...]:
    try:
        return recipe_changes(atomic.read_text(run.recipe_path), recipe_yaml)
    except (OSError, ValueError) as error:
        raise unreadable_file(run.recipe_path, error) from error


def _other_command(run: RunDirectory, command: str) -> str | None:
    """The command that the run was begun with, where it is another one; None where the manifest names none."""
    began = atomic.read_json_object(run.manifest_path).get("command")
    return began if isinstance(began, str) and began != command else None


def _made_by(run: RunDirectory, began: str, command: str) -> FtcliError:
    message = f"the run in {run.path} was begun by `ftcli {began}`, and this is `ftcli {command}`"
    help = f"continue it with `ftcli {began}`; {_ANEW}"
    return FtcliError.single("FT721", message, origin=Origin(str(run.manifest_path)), help=help)


def _changed(run: RunDirectory, changes: tuple[ChangedKey, ...]) -> FtcliError:
    # A section that only one of them has would fill the list with its defaults.
    shown = [str(change) for change in sorted(changes, key=lambda change: not change.in_both)[:_SHOWN]]
    if len(changes) > _SHOWN:
        shown.append(f"{len(changes) - _SHOWN} more keys")
    place = Origin(str(run.recipe_path))
    findings = [Finding("FT721", f"the recipe differs from that of the run in {run.path}: {t}", place) for t in shown]
    remedy = f"to continue the run, undo these changes; {_ANEW}"
    return FtcliError([*findings[:-1], replace(findings[-1], help=remedy)], ExitCode.RECIPE)


def _unusable(path: Path, reason: str) -> FtcliError:
    help = "name a folder like runs/NAME/checkpoints/step-00000100, or use --resume auto"
    return FtcliError.single("FT725", f"cannot resume from {path}: {reason}", help=help)
