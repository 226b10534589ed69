"""Preflight of every run of a sweep, before the first one starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from signal import SIGINT

from ftcli.config.load import LoadedRecipe
from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.ranks import ignore, start_deaf
from ftcli.reporting import Session
from ftcli.tables import methods


@dataclass(frozen=True, slots=True)
class _Checked:
    """The findings of preflight on one recipe; ``exit_code`` is None if it may run."""

    findings: tuple[Finding, ...]
    exit_code: ExitCode | None


def check_all(recipes: Sequence[LoadedRecipe], command: str, session: Session) -> None:
    """Preflight of all recipes. Warnings and notes are told once, however many runs they are about.

    It takes place in a process of its own: asking a GPU what it is takes some of its memory until the process ends.

    Raises:
        FtcliError: All errors, and with which run each of them comes; the exit status is that of the first.
    """
    answers = _in_a_process(recipes, command, session.offline)
    _require_held_out(recipes, command, session)
    told = _merged(recipes, answers)
    refused = [answer.exit_code for answer in answers if answer.exit_code is not None]
    if refused:
        raise FtcliError(told, refused[0])
    for finding in told:
        session.reporter.finding(finding)


def _merged(recipes: Sequence[LoadedRecipe], answers: Sequence[_Checked]) -> list[Finding]:
    """Each finding once. One that not all runs have says which ones do."""
    runs: dict[Finding, list[str]] = {}
    for loaded, answer in zip(recipes, answers, strict=True):
        for finding in dict.fromkeys(answer.findings):
            runs.setdefault(finding, []).append(str(loaded.recipe.run.output_dir).rpartition("/")[2])
    return [
        finding if len(names) == len(recipes) else replace(finding, message=f"{finding.message} [{_few(names)}]")
        for finding, names in runs.items()
    ]


def _few(names: Sequence[str]) -> str:
    rest = len(names) - 1
    return names[0] if not rest else f"{names[0]} and {rest} more"


def _require_held_out(recipes: Sequence[LoadedRecipe], command: str, session: Session) -> None:
    recipe = recipes[0].recipe
    if recipe.data.eval or recipe.eval.tasks or methods.method_of(recipe, command).from_prompts:
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
        return _Checked(preflight(loaded, command=command, device=None, offline=offline).findings, None)
    except FtcliError as error:
        return _Checked(error.findings, error.exit_code)
