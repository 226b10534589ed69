"""Ranks of one run: the first one opens it and says how it goes on; the others do the same, and write nothing but the
end of a run whose first rank was killed.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, FtcliError
from ftcli.plain import JsonMap
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session
from ftcli.run import status as run_status
from ftcli.run.directory import RunDirectory, is_locked
from ftcli.run.report import write_report
from ftcli.run.resume import OpenedRun
from ftcli.run.signals import StopRequest
from ftcli.train.context import RunContext, Unwritten

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup

_RUN = "run"


def micro_batches(recipe: Recipe) -> int:
    """Micro-batches that an optimizer step learns from, over all processes."""
    return recipe.train.gradient_accumulation_steps * recipe.launch.row_shares


def with_its_batch(report: PreflightReport, previous: JsonMap, session: Session) -> PreflightReport:
    """A run that goes on with another number of processes accumulates so much that its steps stay what they were.

    Raises:
        FtcliError: FT737 (exit 2) where that cannot be done.
    """
    recipe, began = report.recipe, previous.get("micro_batches")
    processes = recipe.launch.row_shares
    if not isinstance(began, int) or began == micro_batches(recipe) or recipe.run.resumes_elsewhere:
        return report
    if began % processes:
        fitting = [n for n in range(1, began + 1) if began % n == 0]
        raise FtcliError.single(
            "FT737",
            f"a step of this run has {began} micro-batches, which {processes} processes do not divide evenly",
            exit_code=ExitCode.RECIPE,
            help=f"continue it with {' or '.join(map(str, fitting))} processes",
        )
    each = began // processes
    session.reporter.info(f"a step of this run learns from {began} micro-batches: {processes} x {each} accumulated")
    return with_accumulation(report, each)


def with_accumulation(report: PreflightReport, count: int) -> PreflightReport:
    """The report with another number of micro-batches that each process accumulates."""
    return replace(report, plan=report.plan.changed({"train.gradient_accumulation_steps": count}))


def lead(group: RankGroup, context: RunContext | None) -> None:
    """Tells the other ranks how the run goes on."""
    if context is None:
        group.publish(_RUN, {"complete": True})
        return
    opened = context.opened
    group.publish(
        _RUN,
        {
            "complete": False,
            "resume_from": None if opened.resume_from is None else str(opened.resume_from),
            "trained": opened.trained is not None,
            "accumulation": context.recipe.train.gradient_accumulation_steps,
        },
    )


def follow(
    session: Session, report: PreflightReport, command: str, stop: StopRequest, group: RankGroup
) -> RunContext | None:
    """The run as rank 0 has opened it, for a rank that writes nothing; None when it is complete already."""
    told = group.awaited(_RUN)
    if told["complete"]:
        return None
    run = RunDirectory(Path(str(report.recipe.run.output_dir)))
    status = run_status.read_status(run.status_path) if told["trained"] else None
    resume_from = None if told["resume_from"] is None else Path(told["resume_from"])
    opened = OpenedRun(run, resume_from, already_complete=False, trained=None if status is None else status.trained)
    nothing = Unwritten(run.metrics_path)
    report = with_accumulation(report, told["accumulation"])
    return RunContext(session, command, report, opened, {}, nothing, nothing, stop, nothing, group)


def finish_for_leader(path: Path, error: FtcliError, seconds: float = 5.0) -> None:
    """Writes how the run in ``path`` ended where the process that had it cannot: its status says that it goes on, and
    nobody holds it, or will in so many ``seconds``.
    """
    run, deadline = RunDirectory(path), time.monotonic() + seconds
    while (held := is_locked(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = run_status.read_status(run.status_path)
    if held or status is None or status.state != "running":
        return
    with contextlib.suppress(FtcliError):
        run_status.write_end(run.status_path, error.exit_code, message=error.findings[0].message)
        write_report(run)
