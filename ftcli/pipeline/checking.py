"""`ftcli check`: preflight, nothing built."""

from __future__ import annotations

from typing import Any

from ftcli.config.load import LoadedRecipe
from ftcli.preflight.device import named_device
from ftcli.preflight.report import preflight
from ftcli.reporting import Session


def run(loaded: LoadedRecipe, session: Session, as_gpu: str | None) -> dict[str, Any]:
    """The preflight report as plain data. Raises FtcliError with all findings of the first stage that has errors."""
    device = named_device(as_gpu) if as_gpu is not None else None
    report = preflight(loaded, command="check", device=device, offline=session.offline)
    for finding in report.findings:
        session.reporter.finding(finding)
    return report.as_dict()
