"""Preflight: every check that can be made before anything is built, in stages, each reporting all that it finds.

====================  =================================================================================  =========
stage                 looks at                                                                           exit
====================  =================================================================================  =========
file, schema          the recipe itself (made by ``ftcli.config.load`` before this module is called)     2
cross-field           settings that contradict each other or that no code carries out yet                2
model facts           config.json: length, layers, tokenizer, stored weights                             3
data sample           the first rows of every file                                                       4
machine, memory,      dtype and backends against the GPU, the estimate against its memory, what is       3
disk                  written against free space
====================  =================================================================================  =========

A stage with errors ends preflight; warnings and notes are kept. torch is imported by the machine stage alone, and only
when no device was named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ftcli.config import Recipe
from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.preflight.advice import Verdict, judge
from ftcli.preflight.checkpointing import CheckpointingChoice, choose_checkpointing, with_choice, within_budget
from ftcli.preflight.checks import crossfield, data, files, grpo, machine, model, room, sources, support
from ftcli.preflight.checks.base import Command, Context, NotMade
from ftcli.preflight.device import DeviceFacts, probe_device
from ftcli.preflight.disk import DiskEstimate, estimate_disk, existing_ancestor, free_bytes
from ftcli.preflight.estimate import MemoryEstimate
from ftcli.preflight.facts import ModelFacts, read_facts
from ftcli.preflight.kernels import KernelRow, kernel_rows
from ftcli.preflight.memory import estimate_memory
from ftcli.preflight.policies import execution_of
from ftcli.preflight.precision import DtypePlan, plan_dtypes

#: Stages in order, by the names that reports use.
STAGES = ("file", "schema", "cross-field", "model facts", "data sample", "machine", "memory and disk")


@dataclass(frozen=True, slots=True)
class PreflightReport:
    """What preflight found out. ``findings`` holds warnings and notes: errors are raised.

    ``recipe`` is the recipe as it runs, with the policy of ``checkpointing`` in place of `auto`: what is built and
    trained is built from it. ``memory``, ``verdict`` and ``disk`` are None where no estimate could be made;
    ``not_made`` then says why. ``attention`` is the backend that `auto` came to; ``kernels`` says what computes the
    layers: ``fused`` and ``reference`` are ftcli's, ``transformers`` leaves them as they were; ``kernel_table`` says
    it part by part.
    """

    recipe: Recipe
    facts: ModelFacts
    device: DeviceFacts
    plan: DtypePlan
    checkpointing: CheckpointingChoice
    attention: str
    kernels: str
    kernel_table: tuple[KernelRow, ...]
    memory: MemoryEstimate | None
    verdict: Verdict | None
    disk: DiskEstimate | None
    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``--json``, sizes in bytes. Keys are stable; absent estimates are null."""
        return {
            "stages": list(STAGES),
            "model": _model_dict(self.facts),
            "device": asdict(self.device),
            "dtypes": asdict(self.plan),
            "checkpointing": self.checkpointing.as_dict(),
            "attention": self.attention,
            "kernels": self.kernels,
            "kernel_table": [asdict(row) for row in self.kernel_table],
            "memory": None if self.memory is None else self.memory.as_dict(),
            "verdict": None if self.verdict is None else _verdict_dict(self.verdict),
            "disk": None if self.disk is None else {**asdict(self.disk), "total_bytes": self.disk.total_bytes},
            "findings": [_finding_dict(finding) for finding in self.findings],
            "not_made": [asdict(item) for item in self.not_made],
        }

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titles, each with labelled lines, for people. Findings are not among them."""
        sections = [("model", _model_lines(self.facts)), ("machine", self._machine_lines())]
        if self.memory is not None and self.verdict is not None:
            sections.append(("memory", _memory_lines(self.memory, self.verdict)))
        if self.disk is not None:
            sections.append(("disk", _disk_lines(self.disk)))
        if self.not_made:
            sections.append(("not checked", [(item.check, item.reason) for item in self.not_made]))
        return sections

    def _machine_lines(self) -> list[tuple[str, str]]:
        device, plan = self.device, self.plan
        named = "" if device.probed else " (named, not this machine)"
        adapters = "" if plan.adapter is None else f", adapters {plan.adapter}"
        return [
            ("device", f"{device.name}{named}"),
            ("compute dtype", f"{plan.compute}: {plan.reason}"),
            ("parameters", f"{plan.parameter}{adapters}"),
            ("attention", self.attention),
            ("layers", self.kernels),
            ("gradient checkpointing", str(self.checkpointing)),
        ]


def preflight(loaded: LoadedRecipe, *, command: Command, device: DeviceFacts | None, offline: bool) -> PreflightReport:
    """All checks for ``command`` on a loaded recipe.

    Args:
        device: The device to answer for; None looks at this machine (and imports torch to do so).
        offline: Ask no network; what that leaves unknown is reported as not made.

    Raises:
        FtcliError: All errors of the first stage that has one, with the warnings and notes up to there. Exit 2 for
            cross-field rules, 4 for data, 3 for everything else.
    """
    context = Context(loaded.recipe, loaded.origins, command)
    kept = _Kept()
    kept.stage(
        ExitCode.RECIPE,
        [
            *support.check(context),
            *crossfield.check(context),
            *sources.check(context),
            *grpo.check(context),
            *files.check(context),
        ],
    )
    facts = read_facts(loaded.recipe.model, offline=offline, origins=loaded.origins)
    kept.stage(ExitCode.PREFLIGHT, model.check(context, facts), model.not_made(context, facts))
    if context.reads_data:
        rows = data.check(context, facts, offline=offline)
        kept.stage(ExitCode.DATA, rows.findings, rows.not_made)
    device = probe_device() if device is None else device
    plan = plan_dtypes(loaded.recipe, device)
    planned = within_budget(device, loaded.recipe)
    checkpointing = choose_checkpointing(loaded.recipe, facts, plan, planned, work=context.work)
    recipe = with_choice(loaded.recipe, checkpointing)
    context = replace(context, recipe=recipe)
    execution = execution_of(recipe, facts, plan, device, work=context.work)
    estimates = _estimates(context, facts, plan, planned)
    findings = [*machine.check(context, device, plan), *estimates.findings]
    kept.stage(ExitCode.PREFLIGHT, findings, estimates.not_made)
    return PreflightReport(
        recipe=recipe,
        facts=facts,
        device=device,
        plan=plan,
        checkpointing=checkpointing,
        attention=execution.attention,
        kernels=execution.kernels,
        kernel_table=kernel_rows(recipe, facts, plan, device, execution),
        memory=estimates.memory,
        verdict=estimates.verdict,
        disk=estimates.disk,
        findings=tuple(kept.findings),
        not_made=tuple(kept.not_made),
    )


class _Kept:
    """Findings and unmade checks of the stages so far; raises when a stage has errors."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.not_made: list[NotMade] = []

    def stage(self, exit_code: ExitCode, findings: Iterable[Finding], not_made: Iterable[NotMade] = ()) -> None:
        found = list(findings)
        if any(finding.severity == "error" for finding in found):
            raise FtcliError([*self.findings, *found], exit_code)
        self.findings += found
        self.not_made += not_made


@dataclass(frozen=True, slots=True)
class _Estimates:
    memory: MemoryEstimate | None
    verdict: Verdict | None
    disk: DiskEstimate | None
    findings: tuple[Finding, ...]
    not_made: tuple[NotMade, ...]


def _estimates(context: Context, facts: ModelFacts, plan: DtypePlan, device: DeviceFacts) -> _Estimates:
    findings: list[Finding] = []
    not_made: list[NotMade] = []
    memory = estimate_memory(context.recipe, facts, plan, device, work=context.work)
    verdict = None
    if memory is None:
        not_made.append(NotMade("memory", f"ftcli has no arithmetic for model_type {facts.model_type}"))
    else:
        verdict = judge(memory, context.recipe, facts, device, work=context.work)
        findings += room.memory_findings(context, memory, verdict, device)
        findings += room.host_findings(context, memory, device.host_free_bytes)
        if memory.pinned_host_bytes and not device.probed:
            not_made.append(NotMade("host memory", f"the run is meant for another machine ({device.name})"))
        if verdict.level == "unknown":
            not_made.append(NotMade("memory against the device", f"{device.name} does not say how much it has"))
    disk = None
    if context.trains:
        disk, disk_findings, disk_not_made = _disk(context, facts, device)
        findings += disk_findings
        not_made += disk_not_made
    return _Estimates(memory, verdict, disk, tuple(findings), tuple(not_made))


def _disk(
    context: Context, facts: ModelFacts, device: DeviceFacts
) -> tuple[DiskEstimate | None, list[Finding], list[NotMade]]:
    output = context.recipe.run.output_dir
    output_dir = Path(output if output is not None else "runs").expanduser()
    findings: list[Finding] = []
    not_made: list[NotMade] = []
    estimate = None if facts.shape is None else estimate_disk(context.recipe, facts.shape, free_bytes=None)
    if not device.probed:
        elsewhere = f"the run is meant for another machine ({device.name})"
        return estimate, [], [NotMade("output directory and free disk", elsewhere)]
    findings += room.output_findings(context, output_dir)
    if estimate is None:
        not_made.append(NotMade("free disk", f"ftcli has no arithmetic for model_type {facts.model_type}"))
    elif not findings:
        estimate = replace(estimate, free_bytes=free_bytes(existing_ancestor(output_dir)))
        findings += room.disk_findings(context, estimate, output_dir)
        if estimate.free_bytes is None:
            not_made.append(NotMade("free disk", f"the system does not say for {output_dir}"))
    return estimate, findings, not_made


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


def _model_lines(facts: ModelFacts) -> list[tuple[str, str]]:
    size = "unknown" if facts.parameters is None else f"{facts.parameters / 1e9:.2f} billion parameters"
    if facts.parameters is not None and facts.parameters < 10**8:
        size = f"{facts.parameters / 1e6:.2f} million parameters"
    return [("name", f"{facts.name} ({facts.source})"), ("type", facts.model_type), ("size", size)]


def _memory_lines(memory: MemoryEstimate, verdict: Verdict) -> list[tuple[str, str]]:
    lines = [(name, f"{room.gib(size)} GiB") for name, size in memory.parts.items()]
    of = "" if verdict.available_bytes is None else f" of {room.gib(verdict.available_bytes)} GiB"
    if memory.pinned_host_bytes:
        lines.append(("pinned, on the host", f"{room.gib(memory.pinned_host_bytes)} GiB, by {memory.offloaded}"))
    lines.append((f"peak ({memory.peak})", f"{room.gib(verdict.needed_bytes)} GiB{of}: {verdict.level}"))
    return lines


def _disk_lines(disk: DiskEstimate) -> list[tuple[str, str]]:
    lines = [
        ("checkpoints", f"{disk.checkpoints} of {room.gib(disk.checkpoint_bytes)} GiB"),
        ("result", f"{room.gib(disk.result_bytes)} GiB"),
    ]
    if disk.free_bytes is not None:
        lines.append(("free", f"{room.gib(disk.free_bytes)} GiB"))
    return lines
