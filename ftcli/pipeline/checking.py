"""`ftcli check`: preflight, nothing built; on request, rows as training will see them. And preflight for the others."""

from __future__ import annotations

from typing import Any

from ftcli.config.load import LoadedRecipe
from ftcli.facts.device import DeviceFacts, named_device
from ftcli.preflight.checks.context import Command
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session


def checked(
    loaded: LoadedRecipe, session: Session, command: Command, device: DeviceFacts | None = None
) -> PreflightReport:
    """Preflight for ``command``, its warnings and notes told. Raises FtcliError as :func:`preflight`."""
    report = preflight(loaded, command=command, device=device, offline=session.offline)
    for finding in report.findings:
        session.reporter.finding(finding)
    return report


def check_recipe(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> dict[str, Any]:
    """The preflight report as plain data, with ``samples`` rows of each training source as tokens.

    Raises FtcliError with all findings of the first stage that has errors; for samples, the faults of those rows.
    """
    report = checked(loaded, session, "check", named_device(as_gpu) if as_gpu is not None else None)
    result = report.as_dict()
    if samples:
        result["samples"] = _samples(session, report, samples)
    return result


def _samples(session: Session, report: PreflightReport, count: int) -> list[dict[str, Any]]:
    from ftcli.data.sample import sample_rows
    from ftcli.job import open_job

    job = open_job(report, session)
    return [
        sample.as_dict()
        for source in job.recipe.data.train
        for sample in sample_rows(
            source,
            job.recipe.data,
            job.tokenizer,
            job.stops,
            count,
            prompts_only=report.setup.method.from_prompts,
            offline=session.offline,
        )
    ]
