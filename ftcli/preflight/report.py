"""The result of preflight, as a value: see :func:`ftcli.preflight.stages.preflight`."""

from __future__ import annotations

from dataclasses import dataclass

from ftcli.config.recipe import Recipe
from ftcli.errors import Finding
from ftcli.facts.device import DeviceFacts
from ftcli.facts.model import ModelFacts
from ftcli.plain import JsonObject, plain_fields
from ftcli.plan.checkpointing import CheckpointingChoice
from ftcli.plan.disk import DiskEstimate
from ftcli.plan.execution import ExecutionPart
from ftcli.plan.memory.advice import Verdict
from ftcli.plan.memory.estimate import MemoryEstimate
from ftcli.plan.memory.host_total import HostEstimate
from ftcli.plan.precision import DtypePlan
from ftcli.plan.run import RunPlan
from ftcli.preflight.checks.another_model import AskedModel
from ftcli.preflight.checks.context import NotMade

#: Stages in order, by the names that reports use.
STAGES = ("file", "schema", "cross-field", "model facts", "data sample", "machine", "memory and disk")


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """The result of preflight, without errors, which are raised. ``plan`` has the policy of ``checkpointing`` in place
    of `auto`, and ``device`` limited to the memory that the run plans with: everything after works with it. Estimates
    are None where ``not_made`` says why; ``asked`` is another model, which the method asks before.
    """

    plan: RunPlan
    device: DeviceFacts
    checkpointing: CheckpointingChoice
    parts: tuple[ExecutionPart, ...]
    memory: MemoryEstimate | None
    verdict: Verdict | None
    disk: DiskEstimate | None
    host: HostEstimate | None
    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]
    asked: AskedModel | None = None

    @property
    def recipe(self) -> Recipe:
        return self.plan.recipe

    @property
    def facts(self) -> ModelFacts:
        return self.plan.facts

    @property
    def dtypes(self) -> DtypePlan:
        return self.plan.dtypes

    def as_dict(self) -> JsonObject:
        """The JSON form, sizes in bytes. Keys are stable; absent estimates are null."""
        return {
            "stages": STAGES,
            "model": _model_dict(self.facts),
            "device": self.device,
            "dtypes": self.dtypes,
            "checkpointing": self.checkpointing,
            "attention": self.plan.execution.attention,
            "kernels": self.plan.execution.layers.code,
            "batches": self.plan.execution.batches,
            "kernel_table": self.parts,
            "memory": self.memory,
            "verdict": self.verdict,
            "disk": self.disk,
            "host_memory": self.host,
            "asked": None if self.asked is None else self.asked.as_dict(),
            "findings": [
                {**plain_fields(each), "origin": None if each.origin is None else str(each.origin)}
                for each in self.findings
            ],
            "not_made": self.not_made,
        }


def _model_dict(facts: ModelFacts) -> JsonObject:
    return {
        "name": facts.name,
        "source": facts.source,
        "model_type": facts.model_type,
        "parameters": facts.parameters,
        "active_parameters": facts.active_parameters,
        "max_positions": facts.max_positions,
        "sliding_window": facts.sliding_window,
        "vocab_size": facts.vocab_size,
    }
