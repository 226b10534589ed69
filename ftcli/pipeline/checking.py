"""`ftcli check`: preflight, nothing built; on request, rows as training will see them. And preflight for the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.facts.adapters import adapters
from ftcli.facts.device import named_device
from ftcli.judges import judge_name, judging_tasks
from ftcli.pipeline.check_rows import look_at_rows
from ftcli.plain import FLATTENED, LEFT_OUT
from ftcli.plan.execution import ExecutionPart
from ftcli.plan.trained import PlannedAdapters, trained_parameters
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import checked
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.data.survey import SampledRow, SurveyedSource


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The answer of `ftcli check`.

    Attributes:
        adapters: None for full fine-tuning.
        rows: Which rows were looked at.
        attention: What the layers take, where that is not what the report says; else nothing.
        judges: What `ftcli sample` would judge by.
    """

    report: PreflightReport = field(metadata=FLATTENED)
    adapters: PlannedAdapters | None
    rows: tuple[SurveyedSource, ...] = ()
    attention: str = field(default="", metadata=LEFT_OUT)
    judges: tuple[str, ...] = field(default=(), metadata=LEFT_OUT)
    samples: tuple[SampledRow, ...] = field(default=(), metadata=LEFT_OUT)


def check_recipe(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> CheckResult:
    """The preflight report, with ``samples`` rows of each training source as tokens.

    Raises FtcliError with all findings of the first stage that has errors; the last one is what the rows come to, as
    training and evaluation read them, as far as that can be said here and now.
    """
    report = checked(loaded, session, "check", named_device(as_gpu) if as_gpu is not None else None)
    adapters, attention = _arithmetic(report), ""
    if report.facts.shape is None:
        measured = report.plan.measured
        adapters, attention = measured.adapters, measured.attention
        report = replace(report, parts=tuple(_corrected(part, attention) for part in report.parts))
    shown = _samples(session, report, samples) if samples else ()
    looked = look_at_rows(report, session)
    report = replace(report, not_made=(*report.not_made, *looked.not_made))
    recipe = report.recipe
    judges = tuple(one.file or judge_name(one) for one in recipe.rewards or judging_tasks(recipe))
    return CheckResult(report, adapters, looked.rows, attention, judges, shown)


def _corrected(part: ExecutionPart, attention: str) -> ExecutionPart:
    """The row of attention as the model has it: some families have no SDPA."""
    if part.part != "attention" or part.runs == attention:
        return part
    return replace(part, runs=attention, reason=f"transformers' own; this model has no {part.runs.upper()}")


def _arithmetic(report: PreflightReport) -> PlannedAdapters | None:
    """The planned adapters of a family whose shape is known; None for full fine-tuning."""
    lora, shape = report.recipe.lora, report.facts.shape
    if lora is None or shape is None:
        return None
    layers: Counter[str] = Counter()
    for each in adapters(shape, lora):
        layers[each.linear.leaf] += each.layers
    return PlannedAdapters(layers, {}, trained_parameters(report.recipe, shape).elements)


def _samples(session: Session, report: PreflightReport, count: int) -> tuple[SampledRow, ...]:
    from ftcli.data.survey import sample_rows
    from ftcli.job import open_job

    job = open_job(report, session)
    return tuple(
        sample
        for source in job.recipe.data.train
        for sample in sample_rows(
            source,
            job.recipe.data,
            job.tokenizer,
            job.stops,
            count,
            prompts_only=report.plan.method.from_prompts,
            offline=session.offline,
        )
    )
