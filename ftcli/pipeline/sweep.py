"""`ftcli sweep`: every combination of settings as a run of its own, one after another or one for each GPU.

Each run is a process, started by whoever reads the environment (:data:`Start`), so that one that fails, diverges or is
killed takes nothing with it. A sweep keeps no state of its own: what is finished, and where an interrupted run goes on,
is in the run directories.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftcli.config.dump import dump_recipe
from ftcli.config.grid import Combination
from ftcli.config.load import Override, load_recipe
from ftcli.config.recipe import Recipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.pipeline.sweep_checks import check_all
from ftcli.pipeline.sweep_result import RunOutcome, SweepResult, sweep_result
from ftcli.reporting import Reporter, Session
from ftcli.run.atomic import read_text
from ftcli.run.directory import RunDirectory, is_run_directory
from ftcli.run.recipe_changes import matters, recipe_changes
from ftcli.run.signals import SignalName, StopNow, StopRequest, exit_code_of, second_signal_as_error
from ftcli.run.status import read_status
from ftcli.tables import methods

_SECONDS_BETWEEN_LOOKS = 0.05
_LONGEST_RUN_NAME = 100


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run to be made.

    Attributes:
        combination: Its settings.
        overrides: All of them, with its name and folder.
        recipe: As they make it; the run is held to it.
        command: ``train``, or the command of the recipe's own method.
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
    """The sweep to run.

    Attributes:
        recipe: The recipe's file.
        folder: Where the runs go.
        runs: In the order of the grid.
    """

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
        raise FtcliError.single(
            "FT753",
            f"{folder} is a run, and the runs of a sweep are folders of their own",
            exit_code=ExitCode.RECIPE,
            help=f"name another folder, as in --output-dir {folder}-sweep",
        )
    runs = [_planned(recipe, combination, base, folder) for combination, base in zip(grid, bases, strict=True)]
    return Sweep(recipe, folder, tuple(runs))


def _planned(recipe: Path, combination: Combination, base: Recipe, folder: Path) -> SweepRun:
    path = folder / combination.name
    named = {"run.name": _run_name(str(base.run.name), combination), "run.output_dir": str(path)}
    ours = [Override(f"{key}={json.dumps(value, ensure_ascii=False)}", "ftcli sweep") for key, value in named.items()]
    overrides = (*combination.overrides, *ours)
    made = load_recipe(recipe, overrides).recipe
    return SweepRun(combination, path, overrides, made, methods.method_of(made, "check").command)


def _run_name(name: str, combination: Combination) -> str:
    """The run's name in trackers: the recipe's name and the settings, in the letters that a run's name may have."""
    settings = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in combination.name)
    return f"{name[: _LONGEST_RUN_NAME // 2]}-{settings}"[:_LONGEST_RUN_NAME]


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
        outcomes = {run.path: RunOutcome(run.combination, run.path, 0, None, skipped=True) for run in finished}
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
        outcomes: dict[Path, RunOutcome],
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
            raise FtcliError.single(
                "FT751",
                f"{self._plan.recipe} was changed while the sweep ran, so its runs could not be compared",
                exit_code=ExitCode.RECIPE,
                help="undo the change, and repeat the command; or sweep the new recipe into another --output-dir",
            )
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
            self._outcomes[run.path] = RunOutcome(run.combination, run.path, status, reason)
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
