"""What preflight found out, as a value: see :func:`ftcli.preflight.stages.preflight`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ftcli.config import Recipe
from ftcli.errors import Finding
from ftcli.facts.device import DeviceFacts
from ftcli.facts.execution import Part
from ftcli.facts.model import ModelFacts
from ftcli.facts.precision import DtypePlan
from ftcli.preflight.checks.context import NotMade
from ftcli.preflight.disk import DiskEstimate
from ftcli.preflight.memory.advice import Verdict
from ftcli.preflight.memory.estimate import MemoryEstimate
from ftcli.preflight.memory.policy import CheckpointingChoice
from ftcli.preflight.memory.setup import Setup

#: Stages in order, by the names that reports use.
STAGES = ("file", "schema", "cross-field", "model facts", "data sample", "machine", "memory and disk")


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What preflight found out.

    Attributes:
        setup: The recipe as it runs, with the policy of ``checkpointing`` in place of `auto`, and what is known of
            its model. Everything after preflight works with this recipe.
        device: The machine. ``setup`` has the same one, limited to the memory that the run plans with.
        parts: What runs on each part of the model, and why.
        memory, verdict, disk: None where no estimate could be made; ``not_made`` then says why.
        findings: Warnings and notes: errors are raised.
    """

    setup: Setup
    device: DeviceFacts
    checkpointing: CheckpointingChoice
    parts: tuple[Part, ...]
    memory: MemoryEstimate | None
    verdict: Verdict | None
    disk: DiskEstimate | None
    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe as it runs."""
        return self.setup.recipe

    @property
    def facts(self) -> ModelFacts:
        """The model's facts."""
        return self.setup.facts

    @property
    def plan(self) -> DtypePlan:
        """The dtypes."""
        return self.setup.plan

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``, sizes in bytes. Keys are stable; absent estimates are null."""
        return {
            "stages": list(STAGES),
            "model": _model_dict(self.facts),
            "device": asdict(self.device),
            "dtypes": asdict(self.plan),
            "checkpointing": self.checkpointing.as_dict(),
            "attention": self.setup.execution.attention,
            "kernels": self.setup.execution.layers.code,
            "kernel_table": [asdict(row) for row in self.parts],
            "memory": None if self.memory is None else self.memory.as_dict(),
            "verdict": None if self.verdict is None else _verdict_dict(self.verdict),
            "disk": None if self.disk is None else {**asdict(self.disk), "total_bytes": self.disk.total_bytes},
            "findings": [_finding_dict(finding) for finding in self.findings],
            "not_made": [asdict(item) for item in self.not_made],
        }


def _model_dict(facts: ModelFacts) -> dict[str, Any]:
    return {
        "name": facts.name,
        "source": facts.source,
        "model_type": facts.model_type,
        "parameters": facts.parameters,
        "max_positions": facts.max_positions,
        "sliding_window": facts.sliding_window,
        "vocab_size": facts.vocab_size,
    }


def _verdict_dict(verdict: Verdict) -> dict[str, Any]:
    change = verdict.change
    return {
        "level": verdict.level,
        "needed_bytes": verdict.needed_bytes,
        "available_bytes": verdict.available_bytes,
        "change": None if change is None else {"settings": str(change), "total_bytes": change.total_bytes},
        "fitting_gpus": list(verdict.fitting_gpus),
    }


def _finding_dict(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "origin": None if finding.origin is None else str(finding.origin)}
