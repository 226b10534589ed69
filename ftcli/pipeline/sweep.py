"""`ftcli sweep`: every combination of settings as a run of its own, one after another or one for each GPU.

Each run is a process, started by whoever reads the environment (:data:`Start`), so that one that fails, diverges or is
killed takes nothing with it. A sweep keeps no state of its own: what is finished, and where an interrupted run resumes,
is in the run directories. All combinations go through preflight before the first one starts; at the end the runs stand
side by side, and the best one is named.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGINT
from typing import Protocol

from ftcli.config.grid import Combination
from ftcli.config.load import LoadedRecipe, Override, Settings, load_recipe
from ftcli.config.recipe import Recipe
from ftcli.config.yaml import dump_recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.plain import FLATTENED, JsonObject
from ftcli.ranks import ignore, start_deaf
from ftcli.reporting import Reporter, Session
from ftcli.run.atomic import read_text
from ftcli.run.directory import RunDirectory, is_run_directory
from ftcli.run.recipe_changes import matters, recipe_changes
from ftcli.run.report.page import Comparison, compare, write_comparison
from ftcli.run.signals import SignalName, StopNow, StopRequest, exit_code_of, second_signal_as_error
from ftcli.run.status import read_status
from ftcli.run.summary import RunSummary
from ftcli.tables import methods

_SECONDS_BETWEEN_LOOKS = 0.05
_LONGEST_RUN_NAME = 100


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run to be made: its combination, all overrides with its name and folder, the recipe as they make it, to which
    it is held, and ``train`` or the command of its own method.
    """

    combination: Combination
    path: Path
    overrides: tuple[Override, ...]
    recipe: Recipe
    command: str


class Child(Protocol):
    """The process of a run."""

    def ended(self) -> tuple[int, str | None] | None:
        """Its exit status (negative: the signal that killed it) and why it failed; None while it runs."""

    def signal(self, name: SignalName) -> None:
        """Ask it to stop. A second time stops it at once."""


#: Starts the process of a run on a device, by the name that the environment knows it by; None: as it comes.
Start = Callable[[SweepRun, str | None], Child]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The sweep to run: the recipe's file, where the runs go, and these in the order of the grid."""

    recipe: Path
    folder: Path
    runs: tuple[SweepRun, ...]


def plan_sweep(recipe: Path, grid: Sequence[Combination], output_dir: str | None) -> Sweep:
    """Reads the recipe under every combination.

    Raises FtcliError with what the schema refuses in any of them; FT753 (exit 2) where the folder is a run itself.
    """
    bases: list[Recipe] = []
    faults: list[Finding] = []
    for combination in grid:
        try:
            bases.append(load_recipe(recipe, combination.overrides).recipe)
        except FtcliError as error:
            faults += error.findings
    if faults:
        raise FtcliError(dict.fromkeys(faults), ExitCode.RECIPE)
    folder = Path(output_dir or str(bases[0].run.output_dir))
    if is_run_directory(folder):
        message = f"{folder} is a run, and the runs of a sweep are folders of their own"
        raise FtcliError.single("FT753", message, help=f"name another folder, as in --output-dir {folder}-sweep")
    runs = [_planned(recipe, combination, base, folder) for combination, base in zip(grid, bases, strict=True)]
    return Sweep(recipe, folder, tuple(runs))


def _planned(recipe: Path, combination: Combination, base: Recipe, folder: Path) -> SweepRun:
    path = folder / combination.name
    # The run's name in trackers: the recipe's name and the settings, in the letters that a run's name may have.
    settings = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in combination.name)
    name = f"{str(base.run.name)[: _LONGEST_RUN_NAME // 2]}-{settings}"[:_LONGEST_RUN_NAME]
    named = {"run.name": name, "run.output_dir": str(path)}
    ours = [Override(f"{key}={json.dumps(value, ensure_ascii=False)}", "ftcli sweep") for key, value in named.items()]
    overrides = (*combination.overrides, *ours)
    made = load_recipe(recipe, overrides).recipe
    return SweepRun(combination, path, overrides, made, methods.method_of(made, "check").command)


def sweep(plan: Sweep, session: Session, start: Start, devices: Sequence[str | None]) -> SweepResult:
    """Makes all runs that are not finished, as many at a time as there are ``devices``, and compares them.

    Raises FtcliError with what preflight refuses in any combination, before any is started; FT751 (exit 2) when the
    recipe's file is changed meanwhile; FT728 (exit 75 or 130) after a signal.
    """
    with second_signal_as_error(), StopRequest() as stop:
        finished = [run for run in plan.runs if is_finished(run)]
        waiting = [run for run in plan.runs if run not in finished]
        if waiting:
            with stop.interruptible("checking the combinations"):
                check_all([load_recipe(plan.recipe, run.overrides) for run in waiting], waiting[0].command, session)
        outcomes = {run.path: _ended(run, 0, None, skipped=True) for run in finished}
        for run in finished:
            session.reporter.info(f"{run.path} is complete already")
        crew = _Crew(plan, session.reporter, start, devices, outcomes)
        crew.work(waiting, stop)
        return sweep_result(plan.folder, [outcomes[run.path] for run in plan.runs])


def is_finished(run: SweepRun) -> bool:
    """True if the folder holds the finished run of this very recipe."""
    directory = RunDirectory(run.path)
    status = read_status(directory.status_path)
    if status is None or status.state != "completed" or directory.result_dir is None:
        return False
    with suppress(OSError, ValueError):
        changes = recipe_changes(read_text(directory.recipe_path), dump_recipe(run.recipe))
        return not any(matters(change, run.command) for change in changes)
    return False


class _Crew:
    """Runs on devices. ``outcomes`` is filled as they end."""

    def __init__(
        self,
        plan: Sweep,
        reporter: Reporter,
        start: Start,
        devices: Sequence[str | None],
        outcomes: dict[Path, SweptRun],
    ) -> None:
        self._plan = plan
        self._reporter = reporter
        self._start = start
        self._free = deque(devices)
        self._outcomes = outcomes
        self._running: list[tuple[SweepRun, str | None, Child]] = []
        #: Set by the first run that was stopped from outside: others are not begun then.
        self._stopped_by: ExitCode | None = None

    def work(self, runs: Sequence[SweepRun], stop: StopRequest) -> None:
        """Makes the runs. Raises FT728 when a signal came, to this process or to a run, once all have ended."""
        waiting = deque(runs)
        told = False
        with self._ending():
            while self._running or (waiting and not self._is_stopping(stop)):
                while waiting and self._free and not self._is_stopping(stop):
                    self._begin(waiting.popleft())
                if stop.requested is not None and not told:
                    told = True
                    self._pass_on(stop.requested)
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                self._collect()
        code = exit_code_of(stop.requested) if stop.requested is not None else self._stopped_by
        if code is not None:
            raise self._stopped(code)

    def _is_stopping(self, stop: StopRequest) -> bool:
        return stop.requested is not None or self._stopped_by is not None

    def _begin(self, run: SweepRun) -> None:
        if load_recipe(self._plan.recipe, run.overrides).recipe != run.recipe:
            message = f"{self._plan.recipe} was changed while the sweep ran, so its runs could not be compared"
            help = "undo the change, and repeat the command; or sweep the new recipe into another --output-dir"
            raise FtcliError.single("FT751", message, help=help)
        device = self._free.popleft()
        number, where = self._plan.runs.index(run) + 1, "" if device is None else f" on GPU {device}"
        self._reporter.info(f"run {number} of {len(self._plan.runs)}{where}: {run.path}")
        self._running.append((run, device, self._start(run, device)))

    def _collect(self) -> None:
        for entry in list(self._running):
            run, device, child = entry
            end = child.ended()
            if end is None:
                continue
            self._running.remove(entry)
            self._free.append(device)
            status, reason = end
            self._outcomes[run.path] = _ended(run, status, reason)
            if status in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):
                self._stopped_by = ExitCode(status)
            elif status != 0:
                message = f"{run.path} ended with {status}" + (f": {reason}" if reason else "")
                help = "the other runs go on; the same command again tries this one once more"
                self._reporter.finding(Finding("FT750", message, help=help, severity="warning"))

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever ends the block, no run is left behind: each is asked to stop, and waited for."""
        try:
            yield
        except StopNow as now:
            self._pass_on(now.signal_name)
            raise
        except BaseException:
            self._pass_on("SIGTERM")
            raise
        finally:
            while self._running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                self._collect()

    def _pass_on(self, name: SignalName) -> None:
        for _, _, child in self._running:
            child.signal(name)

    def _stopped(self, code: ExitCode) -> FtcliError:
        done = sum(outcome.exit_code == 0 for outcome in self._outcomes.values())
        message = f"the sweep was stopped; {done} of {len(self._plan.runs)} runs are complete"
        help = "the same command again goes on: complete runs are skipped, the interrupted one continues"
        return FtcliError([Finding("FT728", message, help=help)], code)


#: The findings of preflight on one recipe, and the status that it is refused with; None if it may run.
_Checked = tuple[tuple[Finding, ...], ExitCode | None]


def check_all(recipes: Sequence[LoadedRecipe], command: str, session: Session) -> None:
    """Preflight of all recipes, in a process of its own: asking a GPU what it is takes some of its memory until that
    ends. Warnings and notes are told once.

    Raises FtcliError with all errors, and with which run each of them comes; the exit status is that of the first.
    """
    answers = _in_a_process(recipes, command, session.offline)
    _require_held_out(recipes, command, session)
    told = _merged(recipes, [findings for findings, _ in answers])
    refused = [status for _, status in answers if status is not None]
    if refused:
        raise FtcliError(told, refused[0])
    for finding in told:
        session.reporter.finding(finding)


def _merged(recipes: Sequence[LoadedRecipe], found: Sequence[tuple[Finding, ...]]) -> list[Finding]:
    """Each finding once. One that not all runs have says which ones do."""
    runs: dict[Finding, list[str]] = {}
    for loaded, of_recipe in zip(recipes, found, strict=True):
        for finding in dict.fromkeys(of_recipe):
            runs.setdefault(finding, []).append(str(loaded.recipe.run.output_dir).rpartition("/")[2])
    merged = []
    for finding, names in runs.items():
        few = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        everywhere = len(names) == len(recipes)
        merged.append(finding if everywhere else replace(finding, message=f"{finding.message} [{few}]"))
    return merged


def _require_held_out(recipes: Sequence[LoadedRecipe], command: str, session: Session) -> None:
    recipe = recipes[0].recipe
    if recipe.data.measures or recipe.eval.tasks or methods.method_of(recipe, command).from_prompts:
        return
    message = "the recipe names no held-out data: the sweep will not be able to name the best run"
    session.reporter.finding(Finding("FT752", message, help="name some in data.eval", severity="warning"))


def _in_a_process(recipes: Sequence[LoadedRecipe], command: str, offline: bool) -> tuple[_Checked, ...]:
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, tuple(recipes), command, offline), daemon=True)
    start_deaf(process, [SIGINT])
    sender.close()
    try:
        found: tuple[_Checked, ...] = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process that checks the combinations ended with {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    return found


def _answer(sender: Connection, recipes: Sequence[LoadedRecipe], command: str, offline: bool) -> None:
    ignore([SIGINT])  # a terminal sends it to both processes; the other one decides
    sender.send(tuple(_checked(loaded, command, offline) for loaded in recipes))


def _checked(loaded: LoadedRecipe, command: str, offline: bool) -> _Checked:
    from ftcli.preflight.stages import preflight

    try:
        return preflight(loaded, command=command, device=None, offline=offline).findings, None
    except FtcliError as error:
        return error.findings, error.exit_code


#: The page of the comparison, in the sweep's folder.
PAGE = "comparison.html"


@dataclass(frozen=True, slots=True)
class SweptRun:
    """The end of a run of a sweep: its exit status (negative: a signal), and the reason if it failed.

    ``summary`` are its results, which are there at the end of the sweep; without a run directory there are none.
    """

    summary: RunSummary | None = field(metadata=FLATTENED)
    name: str
    path: Path
    settings: Settings
    exit_code: int
    reason: str | None
    skipped: bool = False


def _ended(run: SweepRun, exit_code: int, reason: str | None, *, skipped: bool = False) -> SweptRun:
    name, settings = run.combination.name, run.combination.settings
    return SweptRun(None, name, run.path, settings, exit_code, reason, skipped)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The answer of `ftcli sweep`. ``best`` has the best run's name, path and settings, and the measure by which it is;
    ``remarks`` say what to keep in mind of it, or why there is none.
    """

    sweep: Path
    runs: Sequence[SweptRun]
    best: JsonObject | None
    remarks: Sequence[str]
    html: Path | None
    comparison: Comparison | None

    @property
    def exit_code(self) -> int:
        """0 where every run is complete, else the status of the first that is not; 1 for one that was killed."""
        codes = [run.exit_code for run in self.runs if run.exit_code != 0]
        return next((code if code > 0 else 1 for code in codes), 0)


#: Measures that runs are compared by, each with 1 if more is better, else -1. The first that all completed runs have
#: decides. Losses of pairs are no measure: they depend on beta and on the loss.
_MEASURES: Mapping[str, tuple[Callable[[RunSummary], float | None], int]] = {
    "share of held-out pairs in the right order": (lambda run: run.preferred, 1),
    "held-out loss": (lambda run: run.eval_loss, -1),
    "mean score of the tasks": (lambda run: sum(run.tasks.values()) / len(run.tasks) if run.tasks else None, 1),
    "reward in training": (lambda run: run.reward, 1),
}


def sweep_result(folder: Path, ended: Sequence[SweptRun]) -> SweepResult:
    """The runs with their results, the best one, and the comparison, which is also written as a page.

    Raises FtcliError FT723 or FT724 where the page cannot be written, FT727 where a run's recipe is not readable.
    """
    there = [run.path for run in ended if is_run_directory(run.path)]
    comparison = compare(there) if there else None
    summaries = {run.path: run for run in comparison.runs} if comparison is not None else {}
    page = folder / PAGE
    if comparison is not None:
        write_comparison(comparison, page)
    runs = [replace(run, summary=summaries.get(run.path)) for run in ended]
    best, remarks = _best([(run, run.summary) for run in runs if run.exit_code == 0 and run.summary is not None])
    return SweepResult(folder, runs, best, remarks, page if comparison is not None else None, comparison)


def _best(complete: Sequence[tuple[SweptRun, RunSummary]]) -> tuple[JsonObject | None, list[str]]:
    """The best, and remarks: what to keep in mind, or why there is none."""
    if not complete:
        return None, ["no run is complete, so none is the best"]
    for metric, (measure, sign) in _MEASURES.items():  # noqa: B007 - the one that ends it is the measure
        values = [value for _, summary in complete if (value := measure(summary)) is not None and math.isfinite(value)]
        if len(values) == len(complete):
            break
    else:
        return None, ["not all runs have held-out results, so none is named the best: name held-out rows in data.eval"]
    value = max(values, key=lambda each: sign * each)
    best, counts = complete[values.index(value)][0], {summary.eval_tokens for _, summary in complete} - {None}
    equal = values.count(value) - 1
    remarks = [f"{equal} more came to the same {metric}: the first is named"] if equal else _at_an_edge(best, complete)
    named = {"name": best.name, "path": best.path, "settings": best.settings, "metric": metric, "value": value}
    if len(counts) > 1:
        remarks.append("the runs were measured on different held-out tokens: their losses are not quite comparable")
    return named, remarks


def _at_an_edge(best: SweptRun, complete: Sequence[tuple[SweptRun, RunSummary]]) -> list[str]:
    """The best of a row of numbers says little where the row ends with it."""
    remarks = []
    for key, value in best.settings.items():
        tried = [run.settings[key] for run, _ in complete]
        numbers = {each for each in tried if isinstance(each, int | float) and not isinstance(each, bool)}
        if len(numbers) >= 3 and value in (min(numbers), max(numbers)):
            side = "largest" if value == max(numbers) else "smallest"
            remarks.append(f"the best {key} is the {side} that was tried: the optimum may lie beyond it")
    return remarks
