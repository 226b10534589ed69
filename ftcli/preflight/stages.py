"""Preflight: every check that can be made before anything is built, in stages, each reporting all that it finds.

====================  =================================================================================  =========
stage                 looks at                                                                           exit
====================  =================================================================================  =========
file, schema          the recipe itself (made by ``ftcli.config.load`` before this module is called)     2
cross-field           settings that contradict each other or are not supported                            2
model facts           config.json: length, layers, tokenizer, stored weights                             3
data sample           the first rows of every file                                                       4
machine, memory,      dtype and backends against the GPU, the estimate against its memory, what is       3
disk                  written against free space
====================  =================================================================================  =========

A stage with errors ends preflight; its warnings and notes, and those of the stages before it, are reported with them.
Only the machine stage imports torch, and only when no device was named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ftcli.config.data import DataConfig, DatasetConfig, Window
from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.facts.device import DeviceFacts, probe_device
from ftcli.facts.model import read_facts
from ftcli.paths import expanded
from ftcli.plan.checkpointing import choose_checkpointing, choose_engine, with_graphs_that_fit, within_budget
from ftcli.plan.disk import DiskEstimate, estimate_disk, existing_ancestor, free_disk_bytes
from ftcli.plan.execution import execution_parts, graphs_part
from ftcli.plan.memory.advice import Verdict, verdict_on
from ftcli.plan.memory.candidates import Candidate, candidate
from ftcli.plan.memory.host_total import HostEstimate, host_estimate
from ftcli.plan.quantization import with_products_tried
from ftcli.plan.run import RunPlan
from ftcli.preflight.checks import (
    another_model,
    crossfield,
    data,
    judging,
    machine,
    memory_and_disk,
    model,
    support,
)
from ftcli.preflight.checks.context import Command, Context, Findings, Found, NotMade
from ftcli.preflight.report import PreflightReport
from ftcli.reporting import Session, SilentReporter
from ftcli.rows.remote import RemoteData
from ftcli.tables import code_of, stores
from ftcli.units import GIB


def preflight(
    loaded: LoadedRecipe,
    *,
    command: Command,
    device: DeviceFacts | None,
    offline: bool,
    hosts: int = 1,
    prompt_tokens: int = 0,
    session: Session | None = None,
) -> PreflightReport:
    """All checks for ``command`` on a loaded recipe, for ``device`` or, with None, this machine (which imports torch),
    and ``hosts`` machines like it, as many processes on each.

    Remote data is fetched into the cache of ``session``; without one it is not. Checks that ``offline`` forbids are
    reported as not made. Raises FtcliError with all errors of the first stage that has one, with the warnings and notes
    up to there: exit 2 for cross-field rules, 4 for data, 3 for everything else.
    """
    context = Context(loaded.recipe, loaded.origins, command)
    found = _Stages()
    found.stage(ExitCode.RECIPE, _about_the_recipe(context))
    facts = read_facts(loaded.recipe.model, offline=offline, origins=loaded.origins)
    found.stage(ExitCode.PREFLIGHT, [*model.check(context, facts), *model.not_made(context, facts)])
    other = another_model.asked_for(context)
    theirs = None if other is None else another_model.facts_of(context, other, offline=offline)
    if other is not None and theirs is not None:
        found.stage(ExitCode.PREFLIGHT, another_model.check(context, other, theirs, facts))
    if context.reads_data:
        if session is not None:
            loaded = replace(loaded, recipe=with_sources(context, session))
            context = replace(context, recipe=loaded.recipe)
        found.stage(ExitCode.DATA, data.check(context, facts, offline=offline))
    device = probe_device() if device is None else device
    if context.work != "export":
        device = with_products_tried(device, loaded.recipe.quantization)
    here = loaded.recipe.launch.num_processes // hosts if context.work == "train" else 1
    each = device.of_each(here)
    plan = RunPlan(
        loaded.recipe, facts, within_budget(each, loaded.recipe), context.work, context.method, hosts, other=theirs
    )
    plan = choose_engine(replace(plan, prompt_tokens=prompt_tokens, sees=data.rows_have_images(context, facts)))
    checkpointing = choose_checkpointing(plan)
    plan = with_graphs_that_fit(checkpointing.applied_to(plan))
    context = replace(context, recipe=plan.recipe)
    memory = candidate(plan)
    verdict = None if memory is None else verdict_on(memory)
    host = None
    if memory is not None and plan.trains:
        host = host_estimate(plan, memory.estimate, max(1, plan.ranks // plan.hosts))
    output = expanded(plan.recipe.run.output_dir or "runs")
    disk = None
    if context.trains:
        free = free_disk_bytes(existing_ancestor(output)) if plan.device.probed else None
        others, element = plan.sizes.other_parameters, plan.dtypes.trained_bytes
        disk = estimate_disk(plan.recipe, plan.trained, others, free_bytes=free, element_bytes=element)
    asked = None if other is None or theirs is None else another_model.planned(plan, other, theirs)
    found.stage(
        ExitCode.PREFLIGHT,
        [
            *machine.check(context, device, plan.dtypes),
            *machine.check_layers(context, device, plan.execution),
            *machine.check_documents(context, plan),
            *machine.check_model(context, plan),
            *machine.check_sharded(context, plan),
            *_memory(context, plan, device, memory, verdict, host),
            *([] if disk is None else _disk(context, plan, disk, output)),
            *([] if asked is None else another_model.memory_findings(context, asked, plan.device)),
        ],
    )
    parts = execution_parts(plan.recipe, plan.facts, plan.dtypes, plan.device, plan.execution)
    return PreflightReport(
        plan=plan,
        device=device,
        checkpointing=checkpointing,
        parts=(*parts, graphs_part(plan.why_no_graphs, plan.graph_tokens)) if plan.trains else parts,
        memory=None if memory is None else memory.estimate,
        verdict=verdict,
        disk=disk,
        host=host,
        findings=tuple(found.findings),
        not_made=tuple(found.not_made),
        asked=asked,
    )


def checked(
    loaded: LoadedRecipe,
    session: Session,
    command: Command,
    device: DeviceFacts | None = None,
    *,
    prompt_tokens: int = 0,
) -> PreflightReport:
    """Preflight for ``command``, its warnings and notes told. Raises FtcliError as :func:`preflight`."""
    place = session.place
    hosts = 1 if place is None or place.size % place.local_size else place.size // place.local_size
    report = preflight(
        loaded,
        command=command,
        device=device,
        offline=session.offline,
        hosts=hosts,
        prompt_tokens=prompt_tokens,
        session=session,
    )
    for finding in report.findings:
        session.reporter.finding(finding)
    return report


#: `ftcli check` fetches sources up to this size to look at their rows.
_LOOKED_AT = 64 * 2**20


def with_sources(context: Context, session: Session) -> Recipe:
    """The recipe with the files of its remote sources on this machine, and `data.held_out` carried out.

    Raises FtcliError FT407 or FT410 (exit 4).
    """
    recipe = context.recipe
    if context.trains or context.command in ("eval", "sample"):
        recipe = recipe.changed({"data": recipe.data.with_held_out()})
    if recipe.data.streaming:
        recipe = recipe.changed({"data": _streamed(recipe, session, trains=context.trains)})
    largest = _LOOKED_AT if context.command == "check" else None
    most = round(recipe.data.remote_cache_gib * GIB)
    remote = RemoteData(session.cache_dir, session.reporter, offline=session.offline, most_bytes=most, largest=largest)

    def all_of(sources: tuple[DatasetConfig, ...]) -> tuple[DatasetConfig, ...]:
        return tuple(source if source.window is not None else remote.fetched(source) for source in sources)

    trained = all_of(recipe.data.train) if context.trains or context.command == "sample" else recipe.data.train
    data = recipe.data.model_copy(update={"train": trained, "eval": all_of(recipe.data.eval)})
    tasks = tuple(task.model_copy(update={"data": all_of(task.data)}) for task in recipe.eval.tasks)
    settings = recipe.eval.model_copy(update={"tasks": tasks if context.scores_tasks else recipe.eval.tasks})
    return recipe.model_copy(update={"data": data, "eval": settings})


def _streamed(recipe: Recipe, session: Session, *, trains: bool) -> DataConfig:
    """The data with its training sources, if it ``trains``, and what is held out of them, as streams."""
    data, most = recipe.data, round(recipe.data.remote_cache_gib * GIB)
    remote = RemoteData(session.cache_dir, SilentReporter(), offline=session.offline, most_bytes=most)
    windows = [
        Window(recipe.run.seed, rows, len(data.train) == 1, None if stores.of(source.path) is None else remote)
        for source, rows in zip(data.train, data.rows_of_window(0), strict=True)
    ]
    trained = data.train
    if trains:
        trained = tuple(source.with_window(window) for source, window in zip(trained, windows, strict=True))
    measured = [
        source if source.part is None else source.with_window(windows[number])
        for number, source in enumerate(data.eval, len(data.train) - len(data.eval))
    ]
    return data.model_copy(update={"train": trained, "eval": tuple(measured)})


def _about_the_recipe(context: Context) -> Findings:
    """All rules that need only the recipe, those of its training method included."""
    yield from support.check(context)
    yield from crossfield.check(context)
    yield from machine.check_shared_rows(context)
    yield from machine.check_copies(context)
    yield from data.check_sources(context)
    yield from judging.check_sampling(context)
    if context.work == "train" and context.method.rules is not None:
        yield from code_of(context.method.rules)(context)
    yield from data.check_files(context)


class _Stages:
    """The findings of the stages so far, and the checks that could not be made; raises when a stage has errors."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.not_made: list[NotMade] = []

    def stage(self, exit_code: ExitCode, found: Iterable[Finding | NotMade]) -> None:
        every = list(found)
        self.findings += [each for each in every if isinstance(each, Finding)]
        self.not_made += [each for each in every if isinstance(each, NotMade)]
        if any(finding.severity == "error" for finding in self.findings):
            raise FtcliError(self.findings, exit_code)


def _memory(
    context: Context,
    plan: RunPlan,
    machine: DeviceFacts,
    found: Candidate | None,
    verdict: Verdict | None,
    host: HostEstimate | None,
) -> Found:
    """``machine`` is what all processes here share."""
    if found is None or verdict is None:
        yield NotMade("memory", plan.measured.unknown)
        return
    device = plan.device
    if host is not None:
        free = machine.free_bytes if machine.kind == "cpu" else machine.host_free_bytes
        yield from memory_and_disk.host_total_findings(context, host, free)
    yield from memory_and_disk.memory_findings(context, found.estimate, verdict, device)
    yield from memory_and_disk.gathering_findings(context, plan, found.estimate)
    yield from memory_and_disk.host_findings(context, found.estimate, device.host_free_bytes)
    if plan.trains and device.kind == "cuda" and not device.probed:
        yield NotMade("host memory", f"the run is meant for another machine ({device.name})")
    if verdict.level == "unknown":
        yield NotMade("memory against the device", f"{device.name} does not say how much it has")


def _disk(context: Context, plan: RunPlan, estimate: DiskEstimate, output: Path) -> Found:
    if not plan.device.probed:
        elsewhere = f"the run is meant for another machine ({plan.device.name})"
        yield NotMade("output directory and free disk", elsewhere)
        return
    impossible = list(memory_and_disk.output_findings(context, output))
    yield from impossible or memory_and_disk.disk_findings(context, estimate, output)
    if not impossible and estimate.free_bytes is None:
        yield NotMade("free disk", f"the system does not say for {output}")
