"""`ftcli check --as all`: one recipe against every GPU that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftcli.config.load import LoadedRecipe
from ftcli.errors import Finding, FtcliError
from ftcli.facts.device import GPUS, named_device
from ftcli.plan.checkpointing import with_graphs_that_fit
from ftcli.plan.memory.candidates import Level, candidate
from ftcli.plan.run import RunPlan
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import preflight
from ftcli.reporting import Session
from ftcli.tables import policies

_ROWS = "train.per_device_train_batch_size"
#: Batches that are tried, each twice the one before.
_DOUBLED = 10


@dataclass(frozen=True, slots=True)
class GpuVerdict:
    """The verdict of preflight on one GPU.

    Attributes:
        verdict: ``refused`` where it is another thing than memory that cannot be.
        peak_bytes: What the run needs there; None where it is refused, or where that is not known.
        most_rows: Rows a micro-batch: the recipe's, doubled as long as that fits under the same checkpointing policy.
        reason: The first thing that cannot be, and what helps.
    """

    gpu: str
    verdict: Level | Literal["refused"]
    peak_bytes: int | None
    available_bytes: int | None
    dtype: str | None = None
    gradient_checkpointing: str | None = None
    most_rows: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EveryGpu:
    """The answers for all GPUs, those with the least memory first."""

    gpus: tuple[GpuVerdict, ...]


def check_every_gpu(loaded: LoadedRecipe, session: Session) -> EveryGpu:
    """Preflight of the recipe for every GPU of the table; rows are looked at by the check for a single one.

    Raises:
        FtcliError: What all of them are refused for alike, such as an error of the recipe or of the model.
    """
    names = sorted(GPUS, key=lambda name: GPUS[name].memory_bytes or 0)
    found = [_asked(loaded, session, name) for name in names]
    errors = [answer for answer in found if isinstance(answer, FtcliError)]
    if len(errors) == len(found) and len({_errors(error) for error in errors}) == 1:
        raise errors[0]
    return EveryGpu(tuple(_verdict(name, answer) for name, answer in zip(names, found, strict=True)))


def _asked(loaded: LoadedRecipe, session: Session, name: str) -> PreflightReport | FtcliError:
    try:
        return preflight(loaded, command="check", device=named_device(name), offline=session.offline)
    except FtcliError as error:
        return error


def _errors(error: FtcliError) -> tuple[Finding, ...]:
    return tuple(finding for finding in error.findings if finding.severity == "error")


def _verdict(name: str, answer: PreflightReport | FtcliError) -> GpuVerdict:
    available = named_device(name).available_bytes
    if isinstance(answer, FtcliError):
        first = _errors(answer)[0]
        level: Level | Literal["refused"] = "does not fit" if first.code == "FT601" else "refused"
        reason = first.message if first.help is None else f"{first.message}; {first.help}"
        return GpuVerdict(name, level, None, available, reason=f"{first.code}: {reason}")
    verdict, plan = answer.verdict, answer.plan
    return GpuVerdict(
        name,
        "unknown" if verdict is None else verdict.level,
        None if verdict is None else verdict.needed_bytes,
        available,
        answer.dtypes.compute,
        policies.as_recipe(plan.recipe.train.checkpointing) if plan.trains else None,
        _most_rows(plan) if plan.trains and verdict is not None else None,
    )


def _most_rows(plan: RunPlan) -> int:
    rows = plan.recipe.train.per_device_train_batch_size
    for _ in range(_DOUBLED):
        found = candidate(with_graphs_that_fit(plan.changed({_ROWS: 2 * rows})))
        if found is None or found.level != "fits":
            break
        rows *= 2
    return rows
