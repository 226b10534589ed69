"""Which of a run's weights are evaluated, asked or exported: its result, or one of its checkpoints."""

from __future__ import annotations

from pathlib import Path

from ftcli.errors import ExitCode, FtcliError
from ftcli.reporting import Reporter
from ftcli.run.atomic import irregular_file
from ftcli.run.directory import RunDirectory, is_run_directory, unreadable_file
from ftcli.run.integrity import hold_result
from ftcli.run.metrics import read_metrics
from ftcli.run.status import read_status
from ftcli.train.best import BestEvaluation

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


def result_of(run: RunDirectory, reporter: Reporter) -> Path:
    """The folder with the run's adapter or model, as training wrote it; what cannot be held against that is told.

    Raises FtcliError FT763 (exit 2) when there is none, FT727 when something in it is no file, FT771 when it was
    changed since.
    """
    result = run.result_dir if is_run_directory(run.path) else None
    if result is None:
        raise FtcliError.single(
            "FT763",
            f"{run.path} holds no finished run: neither adapter/ nor model/ is there",
            exit_code=ExitCode.RECIPE,
            help="train first, name the run's directory, or take one of its checkpoints with --checkpoint STEP",
        )
    irregular = irregular_file(result)
    if irregular:
        raise unreadable_file(result, ValueError(irregular))
    for finding in hold_result(run):
        reporter.finding(finding)
    return result


def _the_end_is_best(run: RunDirectory) -> bool:
    status = read_status(run.status_path)
    if run.result_dir is None or status is None or status.trained is None:
        return False
    best = BestEvaluation()
    for line in read_metrics(run.metrics_path).lines:
        best.note(int(line["step"]), line)
    return best.value is not None and best.step == status.trained.steps
