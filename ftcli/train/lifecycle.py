"""The life of one run, the same for every training method: it is opened, written to, and finished whatever happens.

Of several ranks the first one opens it and says how it goes on; the others do the same, and write nothing but the end
of a run whose first rank was killed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ftcli.config.data import DatasetConfig
from ftcli.config.load import LoadedRecipe
from ftcli.config.recipe import Recipe
from ftcli.config.yaml import dump_recipe
from ftcli.errors import ExitCode, Finding, FtcliError, is_out_of_memory
from ftcli.facts.licence import licence_of
from ftcli.judges import files_of
from ftcli.plain import JsonMap, JsonObject, plain
from ftcli.preflight.report import PreflightReport
from ftcli.preflight.stages import checked
from ftcli.ranks import SIGNAL_NAME
from ftcli.reporting import Session
from ftcli.rows.places import resolve_path
from ftcli.run import status as run_status
from ftcli.run.atomic import read_json_object, store_json
from ftcli.run.directory import RunDirectory, is_locked
from ftcli.run.heartbeat import RankLost
from ftcli.run.inputs import (
    Inputs,
    changed_held_out,
    changed_judges,
    fingerprint,
    noted_files,
    require_same_data,
    require_same_inputs,
    require_same_measures,
    start_files,
)
from ftcli.run.integrity import not_held
from ftcli.run.loggers import OpenLoggers
from ftcli.run.manifest import build_manifest
from ftcli.run.metrics import MetricsWriter
from ftcli.run.mirror import Mirror
from ftcli.run.report import LiveReport, write_report
from ftcli.run.report.card import write_card
from ftcli.run.resume import OpenedRun, open_run
from ftcli.run.signals import (
    LeavePhase,
    SignalName,
    StopNow,
    StopRequest,
    StopRequested,
    exit_code_of,
    second_signal_as_error,
)
from ftcli.train.context import BuiltModel, RunContext, Unwritten

if TYPE_CHECKING:
    from ftcli.run.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class CompleteRun:
    """The run is there already: nothing was done."""

    run: str
    already_complete: bool = True


def complete_result(recipe: Recipe, session: Session) -> CompleteRun:
    """The answer when the run is there already."""
    path = Path(str(recipe.run.output_dir))
    session.reporter.info(
        f"{path} holds the finished run of this recipe; use --resume never to train again (the old run is kept)"
    )
    return CompleteRun(str(path))


@contextmanager
def checked_run(
    loaded: LoadedRecipe, session: Session, command: str, group: RankGroup | None = None
) -> Iterator[RunContext | None]:
    """Preflight, then the recipe's run directory for this process; None when its run is complete already.

    Of several ranks the first one opens it, and the others follow.

    From the first moment SIGTERM, SIGHUP and SIGINT end the run in an orderly way: exit 75 or 130, status.json and
    report written. Whatever ends the block is written there, then goes on its way.
    """
    recipe = loaded.recipe
    folder = None if session.place is None else session.place.folder
    passed_on = None if folder is None else folder / SIGNAL_NAME
    stopping = StopRequest(sigterm=recipe.checkpoint.on_sigterm, say=session.reporter.info, passed_on=passed_on)
    with second_signal_as_error(), stopping as stop:
        if group is not None:
            group.listen(lambda: stop.requested)
        with stop.interruptible("checking the recipe"):
            report = checked(loaded, session, command)
        if group is not None and not group.leads:
            with _finished_for_leader(Path(str(recipe.run.output_dir)), stop):
                with stop.interruptible("opening the run directory"):
                    followed = follow(session, report, command, stop, group)
                yield followed
            return
        with _opened_run(recipe, session, report, command, stop, group) as context:
            if group is not None:
                lead(group, context)
            if context is not None and report.checkpointing.requested == "auto":
                session.reporter.info(f"gradient_checkpointing: {report.checkpointing}")
            yield context


@contextmanager
def _opened_run(
    recipe: Recipe, session: Session, report: PreflightReport, command: str, stop: StopRequest, group: RankGroup | None
) -> Iterator[RunContext | None]:
    recipe_yaml = dump_recipe(recipe)  # with what is left to be chosen: a machine that continues may choose otherwise
    path = Path(str(recipe.run.output_dir))
    with _never_left_running(path, stop), ExitStack() as stack:
        mirror = stack.enter_context(_mirrored(recipe, session, stop))
        with stop.interruptible("opening the run directory"):
            opened = stack.enter_context(open_run(path, recipe.run.resume, recipe_yaml, command))
        for warning in opened.warnings:
            session.reporter.finding(warning)
        if opened.already_complete:
            _repair_report(opened, session)
            yield None
            return
        with _recorded(opened, session, stop):
            previous = read_json_object(opened.directory.manifest_path) if opened.resume_step else {}
            for finding in [] if recipe.run.resumes_elsewhere else unheld_inputs(opened, previous):
                session.reporter.finding(finding)
            report = with_its_batch(report, previous, session)
            metrics = stack.enter_context(
                MetricsWriter(
                    opened.directory.metrics_path,
                    resume_step=opened.resume_step,
                    evaluate_again=_evaluates_again(opened),
                )
            )
            with stop.interruptible("opening the metrics loggers"):
                loggers = stack.enter_context(_open_loggers(recipe, opened, session))
            context = RunContext(
                session,
                command,
                report,
                opened,
                previous,
                metrics,
                loggers,
                stop,
                LiveReport(opened.directory),
                group,
                mirror,
            )
            with stop.interruptible("reading the data's fingerprints"):
                _write_manifest(context, recipe_yaml)
            if opened.trained is not None:
                session.reporter.info(f"training is complete ({opened.resume_step} steps); continuing after it")
            elif opened.resume_from is not None:
                session.reporter.info(f"resuming from {opened.resume_from}")
            yield context


@contextmanager
def _mirrored(recipe: Recipe, session: Session, stop: StopRequest) -> Iterator[Mirror | None]:
    """The run's copy in a bucket, where it has one: brought here where it is ahead, and made whole whatever ends the
    block, but for a second signal.
    """
    if recipe.run.mirror is None:
        yield None
        return
    mirror = Mirror(recipe.run.mirror, RunDirectory(Path(str(recipe.run.output_dir))), session.reporter)
    try:
        with stop.interruptible("fetching the run's mirror"):
            mirror.restore(recipe.run.resume)
        try:
            yield mirror
        except StopNow:
            raise
        except BaseException:  # the run resumes elsewhere from what it ended with
            with stop.held():
                _finish_warning(mirror, session)
            raise
        with stop.held():
            mirror.finish()
    finally:
        mirror.close()


def _finish_warning(mirror: Mirror, session: Session) -> None:
    try:
        mirror.finish()
    except FtcliError as error:
        for finding in error.findings:
            session.reporter.finding(replace(finding, severity="warning"))


def _evaluates_again(opened: OpenedRun) -> bool:
    """True if the step that the run resumes from is evaluated again: training is over, or a stop has left it out of the
    checkpoint. A run that was killed after that may have logged it already.
    """
    if opened.trained is not None or opened.resume_from is None:
        return opened.trained is not None
    from ftcli.train.checkpoint_state import WindowState, readable  # which imports torch

    with readable(str(opened.resume_from)):
        state = WindowState.read(opened.resume_from)
    return state is not None and state.evaluation_due


def unheld_inputs(opened: OpenedRun, previous: JsonMap) -> list[Finding]:
    """FT770 where a run resumes and its manifest does not say what it began with."""
    if not opened.resume_step:
        return []
    inputs = previous.get("inputs")
    known = inputs if isinstance(inputs, dict) else {}
    lists = [*(previous.get(key) for key in ("data", "held_out", "judges")), known.get("files"), known.get("weights")]
    if not known or not isinstance(previous.get("data"), list) or any(each and not noted_files(each) for each in lists):
        reason = "manifest.json is missing or damaged, so data, chat template and base model may be others than before"
    elif not known.get("files") and not known.get("commit"):
        reason = "ftcli 0.1 noted nothing of the base's config.json and tokenizer files"
    else:
        return []
    return [not_held(str(opened.directory.path), reason)]


@contextmanager
def _never_left_running(path: Path, stop: StopRequest) -> Iterator[None]:
    """Whenever a signal comes, while the run is opened or while its end is written, status.json says how it ended."""
    try:
        yield
    except (StopRequested, StopNow) as error:
        with stop.held(), contextlib.suppress(FtcliError):
            run_status.finish_own(RunDirectory(path).status_path, error.exit_code, message=str(error))
        raise


@contextmanager
def _finished_for_leader(path: Path, stop: StopRequest) -> Iterator[None]:
    """Finishes status.json in place of a first rank that was killed."""
    try:
        yield
    except (RankLost, StopRequested) as error:
        is_gone = isinstance(error, RankLost) and (0 in error.ranks or not error.ranks)  # it may be just ending
        with stop.held():
            finish_for_leader(path, error, seconds=5.0 if is_gone else 0.0)
        raise


def _open_loggers(recipe: Recipe, opened: OpenedRun, session: Session) -> OpenLoggers:
    return OpenLoggers(
        recipe.logging.loggers,
        opened.directory.path,
        recipe.model_dump(mode="json"),
        session.reporter,
        resume_step=opened.resume_step,
        new_series=recipe.run.resumes_elsewhere,
        offline=session.offline,
    )


@contextmanager
def _recorded(opened: OpenedRun, session: Session, stop: StopRequest) -> Iterator[None]:
    """However the block ends, status.json and the report say so.

    Where these cannot be written any more (a full disk, a vanished folder), the error that ended the run is raised
    all the same, and not the one about writing.
    """
    with _ended(opened, session, stop):
        yield
        with stop.held():
            opened.finish(ExitCode.OK)
            stop.over()
            session.on_complete()
    try:
        write_card(opened.directory)
        _report(opened, session)
    except FtcliError as error:  # the run is complete, whatever became of its picture
        for finding in error.findings:
            session.reporter.finding(replace(finding, severity="warning"))


@contextmanager
def _ended(opened: OpenedRun, session: Session, stop: StopRequest) -> Iterator[None]:
    """Writes the error that ends the block, whole: a second signal waits for that."""
    try:
        yield
    except LeavePhase:
        error = stop.stopped()
        with stop.held():
            _write_end(opened, session, error.exit_code, error.findings[0].message)
        raise error from None
    except FtcliError as error:
        with stop.held():
            _write_end(opened, session, error.exit_code, error.findings[0].message)
        raise
    except StopNow as error:
        _end_quietly(opened, error.exit_code, str(error))
        raise
    except BaseException as error:
        code = ExitCode.OUT_OF_MEMORY if is_out_of_memory(error) else ExitCode.BUG
        with stop.held():
            _end_quietly(opened, code, f"{type(error).__name__}: {str(error)[:200]}")
        raise


def _write_end(opened: OpenedRun, session: Session, code: ExitCode, message: str) -> None:
    with contextlib.suppress(FtcliError):
        opened.finish(code, message=message)
        _report(opened, session)


def _end_quietly(opened: OpenedRun, code: ExitCode, message: str) -> None:
    """Status and report of a run that was cut off; the report, too, has to stop saying that it goes on."""
    with contextlib.suppress(FtcliError):
        opened.finish(code, message=message)
        write_report(opened.directory)


def _repair_report(opened: OpenedRun, session: Session) -> None:
    """The report of a complete run whose process was killed between the two files."""
    report, status = opened.directory.report_path, opened.directory.status_path
    if not report.is_file() or report.stat().st_mtime_ns < status.stat().st_mtime_ns:
        with contextlib.suppress(FtcliError):
            write_card(opened.directory)
            _report(opened, session)


def _report(opened: OpenedRun, session: Session) -> None:
    write_report(opened.directory)
    session.reporter.info(f"report: {opened.directory.report_path}")


def _write_manifest(context: RunContext, recipe_yaml: str) -> None:
    opened, report, recipe = context.opened, context.report, context.recipe
    files = data_files(recipe.data.train)
    data = [fingerprint(name, path) for name, path in files.items()]
    if recipe.lora is not None and recipe.lora.start_from is not None:  # what training begins with
        data += start_files(recipe.lora.start_from)
    scores_tasks = report.plan.method.scores_tasks
    held_out = _held_out(recipe, scores_tasks=scores_tasks)
    measured = [fingerprint(name, path) for name, path in data_files(held_out).items()]
    sources = [source.path for source in held_out]
    judged = files_of(recipe) if scores_tasks or recipe.eval.tasks_every_steps is not None else {}
    judges = [fingerprint(name, path) for name, path in judged.items()]  # their settings are the recipe's
    if context.held_to_inputs:
        require_same_data(context.previous, data, files)
        require_same_measures(context.previous, measured, sources, judges)
    elif opened.resume_from is not None:
        began = read_json_object(RunDirectory(opened.resume_from.resolve().parent.parent).manifest_path)
        told = {"another reward or judge": changed_judges(began, judges)}
        told["other held-out data"] = changed_held_out(began, measured, sources)
        for what, said in ((what, said) for what, all_said in told.items() for said in all_said):
            message = f"{opened.resume_from} was trained with {what}: {said}"
            context.session.reporter.finding(Finding("FT732", message, severity="warning"))
    manifest = build_manifest(
        command=context.command,
        recipe_yaml=recipe_yaml,
        device=report.device,
        seeds={"seed": recipe.run.seed},
        dtype_plan=report.dtypes,
        parts=report.parts,
        data=data,
        held_out=measured,
        judges=judges,
        activations=_activations(report),
        resume_step=opened.resume_step,
        previous=context.previous,
        predicted_memory=report.memory,
        predicted_host_memory=report.host,
        ranks=recipe.launch.num_processes,
        micro_batches=micro_batches(recipe),
    )
    store_json(opened.directory.manifest_path, manifest)


def _held_out(recipe: Recipe, *, scores_tasks: bool) -> Sequence[DatasetConfig]:
    """Sources that are measured before and after training: by methods that score tasks the rows of these."""
    of_tasks = [source for task in recipe.eval.tasks for source in task.data or recipe.data.eval]
    if scores_tasks:
        return of_tasks
    return [*recipe.data.eval, *(of_tasks if recipe.eval.tasks_every_steps is not None else ())]


def _activations(report: PreflightReport) -> JsonObject:
    choice, memory = report.checkpointing, report.memory
    return {
        "requested": choice.requested,
        "gradient_checkpointing": choice.policy,
        "uncheckpointed_layers": choice.uncheckpointed_layers,
        "reason": choice.reason,
        "offloaded": None if memory is None else memory.offloaded,
        "pinned_host_bytes": None if memory is None else memory.pinned_host_bytes,
    }


def data_files(sources: Sequence[DatasetConfig]) -> dict[str, Path]:
    """The local data files by the names that the recipe gives them; files of a folder by their path below it.

    Datasets of the Hub have no local files. Their content is compared by its token ids (:func:`keep_inputs`).
    """
    found: dict[str, Path] = {}
    for source in sources:
        if source.window is not None:  # held to what it has read by each checkpoint
            continue
        if source.files is not None:
            found |= dict(source.files)
            continue
        path = resolve_path(source.path)
        if path.is_file():
            found[source.path] = path
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            found |= {f"{source.path.rstrip('/')}/{p.relative_to(path).as_posix()}": p for p in inside}
    return found


def keep_inputs(context: RunContext, inputs: Inputs) -> None:
    """Writes template, token ids and weights into the manifest, after holding them to those the run began with.

    Raises FtcliError FT731, FT734 or FT735 (exit 2) with what differs.
    """
    if not context.leads:
        return
    if context.held_to_inputs:
        require_same_inputs(context.previous, inputs)
    licence = licence_of(context.report.facts, context.recipe.model.revision, offline=context.session.offline)
    base = {"model_type": context.report.facts.model_type, "licence": licence}
    add_to_manifest(context, {"inputs": inputs, "base": base})


def add_to_manifest(context: RunContext, part: JsonMap | BuiltModel) -> None:
    """Adds what is known only once the model is built, or trained."""
    if not context.leads:
        return
    manifest = read_json_object(context.directory.manifest_path)
    store_json(context.directory.manifest_path, {**manifest, **plain(part)})


def raise_if_stopped(context: RunContext, stopped_by: SignalName | None, step: int) -> None:
    """Ends a run that a signal stopped, after its checkpoint was written (exit 75 or 130)."""
    if stopped_by is None:
        return
    checkpoint = context.directory.checkpoints.path(step)
    raise FtcliError(
        [
            Finding(
                "FT701",
                f"stopped by {stopped_by} after step {step}; checkpoint written to {checkpoint}",
                help="run the same command again: it continues from there",
            )
        ],
        exit_code_of(stopped_by),
    )


_TOLD = "run"


def micro_batches(recipe: Recipe) -> int:
    """Micro-batches that an optimizer step learns from, over all processes."""
    return recipe.train.gradient_accumulation_steps * recipe.launch.row_shares


def with_its_batch(report: PreflightReport, previous: JsonMap, session: Session) -> PreflightReport:
    """A run that resumes with another number of processes accumulates so much that its steps stay what they were.

    Raises:
        FtcliError: FT737 (exit 2) where that cannot be done.
    """
    recipe, began = report.recipe, previous.get("micro_batches")
    processes = recipe.launch.row_shares
    if not isinstance(began, int) or began == micro_batches(recipe) or recipe.run.resumes_elsewhere:
        return report
    if began % processes:
        fitting = [n for n in range(1, began + 1) if began % n == 0]
        message = f"a step of this run has {began} micro-batches, which {processes} processes do not divide evenly"
        raise FtcliError.single("FT737", message, help=f"continue it with {' or '.join(map(str, fitting))} processes")
    each = began // processes
    session.reporter.info(f"a step of this run learns from {began} micro-batches: {processes} x {each} accumulated")
    return with_accumulation(report, each)


def with_accumulation(report: PreflightReport, count: int) -> PreflightReport:
    """The report with another number of micro-batches that each process accumulates."""
    return replace(report, plan=report.plan.changed({"train.gradient_accumulation_steps": count}))


def lead(group: RankGroup, context: RunContext | None) -> None:
    """Tells the other ranks how the run resumes."""
    if context is None:
        group.publish(_TOLD, {"complete": True})
        return
    opened = context.opened
    group.publish(
        _TOLD,
        {
            "complete": False,
            "resume_from": None if opened.resume_from is None else str(opened.resume_from),
            "trained": opened.trained is not None,
            "accumulation": context.recipe.train.gradient_accumulation_steps,
        },
    )


def follow(
    session: Session, report: PreflightReport, command: str, stop: StopRequest, group: RankGroup
) -> RunContext | None:
    """The run as rank 0 has opened it, for a rank that writes nothing; None when it is complete already."""
    told = group.awaited(_TOLD)
    if told["complete"]:
        return None
    run = RunDirectory(Path(str(report.recipe.run.output_dir)))
    status = run_status.read_status(run.status_path) if told["trained"] else None
    resume_from = None if told["resume_from"] is None else Path(told["resume_from"])
    opened = OpenedRun(run, resume_from, already_complete=False, trained=None if status is None else status.trained)
    nothing = Unwritten(run.metrics_path)
    report = with_accumulation(report, told["accumulation"])
    return RunContext(session, command, report, opened, {}, nothing, nothing, stop, nothing, group)


def finish_for_leader(path: Path, error: FtcliError, seconds: float = 5.0) -> None:
    """Writes how the run in ``path`` ended where the process that had it cannot: its status says that it goes on, and
    nobody holds it, or will in so many ``seconds``.
    """
    run, deadline = RunDirectory(path), time.monotonic() + seconds
    while (held := is_locked(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    status = run_status.read_status(run.status_path)
    if held or status is None or status.state != "running":
        return
    with contextlib.suppress(FtcliError):
        run_status.write_end(run.status_path, error.exit_code, message=error.findings[0].message)
        write_report(run)
