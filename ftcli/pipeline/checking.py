"""`ftcli check`: preflight, nothing built; on request, rows as training will see them."""

from __future__ import annotations

from typing import Any

from ftcli.config.load import LoadedRecipe
from ftcli.facts.device import named_device
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session


def run(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> dict[str, Any]:
    """The preflight report as plain data, with ``samples`` rows of each training source as tokens.

    Raises FtcliError with all findings of the first stage that has errors; for samples, the faults of those rows.
    """
    device = named_device(as_gpu) if as_gpu is not None else None
    report = preflight(loaded, command="check", device=device, offline=session.offline)
    for finding in report.findings:
        session.reporter.finding(finding)
    result = report.as_dict()
    if samples:
        result["samples"] = _samples(loaded, session, report, samples)
    return result


def _samples(loaded: LoadedRecipe, session: Session, report: PreflightReport, count: int) -> list[dict[str, Any]]:
    from ftcli.data.sample import sample_rows
    from ftcli.pipeline import build

    recipe = loaded.recipe
    texts = build.texts_of(recipe, report, session)
    prompts_only = recipe.grpo is not None
    return [
        sample.as_dict()
        for source in recipe.data.train
        for sample in sample_rows(
            source,
            recipe.data,
            texts.tokenizer,
            texts.stops,
            count,
            prompts_only=prompts_only,
            offline=session.offline,
        )
    ]
