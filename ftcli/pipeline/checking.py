"""`ftcli check`: preflight, nothing built; on request, rows as training will see them. And preflight for the others."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftcli.config.load import LoadedRecipe
from ftcli.facts.device import DeviceFacts, named_device
from ftcli.facts.trained import PlannedAdapters, trained_parameters
from ftcli.plain import LEFT_OUT, SPREAD
from ftcli.preflight.checks.context import Command, NotMade
from ftcli.preflight.checks.model import TARGETS_CHECK
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.data.sample import SampledRow


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What `ftcli check` answers. ``adapters`` is None for full fine-tuning."""

    report: PreflightReport = field(metadata=SPREAD)
    adapters: PlannedAdapters | None
    samples: tuple[SampledRow, ...] = field(default=(), metadata=LEFT_OUT)


def checked(
    loaded: LoadedRecipe, session: Session, command: Command, device: DeviceFacts | None = None
) -> PreflightReport:
    """Preflight for ``command``, its warnings and notes told. Raises FtcliError as :func:`preflight`."""
    report = preflight(loaded, command=command, device=device, offline=session.offline)
    for finding in report.findings:
        session.reporter.finding(finding)
    return report


def check_recipe(loaded: LoadedRecipe, session: Session, as_gpu: str | None, samples: int = 0) -> CheckResult:
    """The preflight report, with ``samples`` rows of each training source as tokens.

    Raises FtcliError with all findings of the first stage that has errors; for samples, the faults of those rows.
    """
    report = checked(loaded, session, "check", named_device(as_gpu) if as_gpu is not None else None)
    adapters, not_made = _adapters(report), report.not_made
    if report.facts.shape is None and adapters is not None:  # looked at here, in the model's outline
        not_made = tuple(item for item in not_made if item.check != TARGETS_CHECK)
    not_made = (*not_made, NotMade("rows as tokens", _why_no_tokens(samples)))
    return CheckResult(
        replace(report, not_made=not_made), adapters, _samples(session, report, samples) if samples else ()
    )


def _why_no_tokens(samples: int) -> str:
    looked = f"only the first {samples} of each source were, here" if samples else "--show-sample N looks at some"
    return f"the command that tokenizes them holds them against the chat template and data.max_seq_len; {looked}"


def _adapters(report: PreflightReport) -> PlannedAdapters | None:
    """What the recipe adapts; None for full fine-tuning.

    Where the family's arithmetic is not known, the model is built without memory.
    Raises FtcliError FT311 to FT314 for names that mean nothing in it, FT305 where it cannot be built, FT336 where it
    has nothing to quantise.
    """
    lora, shape = report.recipe.lora, report.facts.shape
    if lora is None:
        return None
    if shape is not None:
        layers = {linear.leaf: shape.num_layers for linear in shape.adapted(lora.target_modules)}
        trained = trained_parameters(report.recipe, shape).elements
        return PlannedAdapters(layers, {}, trained)
    from ftcli.model.checkpoint import hollow
    from ftcli.model.load import config_of
    from ftcli.model.quantize import layers_to_quantize
    from ftcli.model.targets import planned
    from ftcli.tables import quantizations

    model = hollow(config_of(report.facts.raw))
    packs = quantizations.row(report.recipe.quantization.method).quantize is not None
    return planned(model, lora, layers_to_quantize(model) if packs else frozenset())


def _samples(session: Session, report: PreflightReport, count: int) -> tuple[SampledRow, ...]:
    from ftcli.data.sample import sample_rows
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
            prompts_only=report.setup.method.from_prompts,
            offline=session.offline,
        )
    )
