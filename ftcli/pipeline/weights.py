"""Which of a run's weights `ftcli eval` and `ftcli export` take: its result, or one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from ftcli.reporting import Reporter
from ftcli.run.directory import RunDirectory
from ftcli.run.history import metrics_of
from ftcli.run.status import read_status
from ftcli.trainers.best import Best

BEST = "best"


def checkpoint_of(run: RunDirectory, name: str | None, reporter: Reporter) -> Path | None:
    """The checkpoint that ``--checkpoint NAME`` means; None for the run's result.

    The result is the best when the evaluation at the end of training was: no checkpoint is written of it.

    Args:
        name: A step, ``best``, or None.

    Raises:
        FtcliError: FT725 (exit 2) when there is no such checkpoint.
    """
    if name is None:
        return None
    if name == BEST and _the_end_is_best(run):
        reporter.info(f"{run.path}: the best evaluation was at the end, so the run's result is taken")
        return None
    return run.checkpoints.named(name)


def _the_end_is_best(run: RunDirectory) -> bool:
    status = read_status(run.status_path)
    if run.result_dir is None or status is None or status.trained is None:
        return False
    best = Best()
    for line in metrics_of(run):
        best.note(int(line["step"]), line)
    return best.value is not None and best.step == status.trained.steps
