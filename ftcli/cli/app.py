"""The `ftcli` command: parses, runs, and maps every outcome to text and an exit status in one place."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from io import TextIOWrapper
from typing import Annotated

import typer
from typer.exceptions import TyperException

from ftcli import __version__
from ftcli.cli import failure, render
from ftcli.cli.commands import bench, chat, check, doctor, evaluate, export, recipes, runs, sample, sweep
from ftcli.cli.commands.train import training_command
from ftcli.cli.environment import (
    fewer_library_warnings,
    let_go_of_broken_streams,
    library_environment,
    open_missing_streams,
    open_session,
    results_only_on_stdout,
    style_for,
    unfailing,
)
from ftcli.cli.options import AnyRequest, EndedElsewhere, Invocation
from ftcli.errors import ExitCode, Finding, FtcliError, first_line
from ftcli.tables import methods

_PLAIN_HELP: dict[str, int | list[str]] = {"help_option_names": ["--help", "-h"], "max_content_width": 100}

_EPILOG = (
    "\b\nExamples:\n"
    "  ftcli recipes list\n"
    "  ftcli check recipes/gemma2-9b.yaml --as h100\n"
    "  ftcli train recipes/smoke.yaml\n"
    "  ftcli eval recipes/smoke.yaml --run runs/smoke\n"
)

#: Findings shown to a person at once.
_MOST_SHOWN = 100

#: What a shell reports for a program that wrote into a closed pipe.
_BROKEN_PIPE = 141


def build_app(only: str | None = None) -> typer.Typer:
    """The commands and their options; where ``only`` is the name of one, that one, which is made in a moment."""
    app = typer.Typer(
        name="ftcli",
        help="Fine-tune language models from YAML recipes, checked before anything is built.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_PLAIN_HELP,
        no_args_is_help=False,
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
    ) -> None:
        if version:
            typer.echo(f"ftcli {__version__}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit

    commands: dict[str, Callable[..., AnyRequest]] = {
        **{name: training_command(method) for name, method in methods.of_commands().items()},
        "eval": evaluate.evaluate,
        "export": export.export,
        "chat": chat.chat,
        "sample": sample.sample,
        "check": check.check,
        "bench": bench.bench,
        "runs": runs.runs,
        "compare": runs.compare,
        "sweep": sweep.sweep,
        "doctor": doctor.doctor,
    }
    for name in [only] if only in commands else commands:
        app.command(name, context_settings=_PLAIN_HELP)(commands[name])
    if only not in commands:
        app.add_typer(recipes.build_app(_PLAIN_HELP), name="recipes")
    return app


@dataclass(frozen=True, slots=True)
class _Answer:
    """The outcome of one invocation. ``told`` are the findings that its reporter has printed already. Of several ranks
    one tells it (``told_by_us``).
    """

    exit_code: int
    findings: tuple[Finding, ...] = ()
    told: tuple[Finding, ...] = ()
    result: object = None
    text: str | None = None
    told_by_us: bool = True


class _CtrlC:
    """Ctrl-C where no phase of a command answers it: :class:`KeyboardInterrupt`. A run that is complete stays so: then
    the first one has nothing left to stop, and the second one ends what is still being told.
    """

    def __init__(self) -> None:
        self._complete = False
        self._ours = False

    def __enter__(self) -> _CtrlC:
        in_main = threading.current_thread() is threading.main_thread()  # where Python runs signal handlers
        self._ours = in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under `nohup`
        if self._ours:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def complete(self) -> None:
        """The result of the command is whole."""
        self._complete = True

    def _on_signal(self, _number: int, _frame: object) -> None:
        if not self._complete:
            raise KeyboardInterrupt
        self._complete = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit status. Prints everything itself; raises nothing."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_missing_streams()
    _forgive_encodings()
    try:
        with _CtrlC() as ctrl_c:
            status = _main(words, ctrl_c)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        status = _BROKEN_PIPE
    except KeyboardInterrupt:
        status = _interrupted()
    except OSError as error:
        message = f"the result could not be written to stdout: {first_line(error)}"
        _tell_people([Finding("FT194", message, help="what a run has written into its folder is complete")])
        status = int(ExitCode.PREFLIGHT)
    let_go_of_broken_streams()
    return status


def _main(words: list[str], ctrl_c: _CtrlC) -> int:
    parsed = _parse(words)
    if isinstance(parsed, int):
        return parsed
    if isinstance(parsed, _Answer):
        _tell(parsed, command=None, json="--json" in words)
        return parsed.exit_code
    answer = _run(parsed, words, ctrl_c)
    if isinstance(answer.result, EndedElsewhere) or not answer.told_by_us:
        return answer.exit_code
    if parsed.raw and answer.text is not None:
        typer.echo(answer.text)
    else:
        _tell(answer, command=parsed.command, json=parsed.options.json)
    return answer.exit_code


def _parse(words: list[str]) -> AnyRequest | _Answer | int:
    """The request; or the answer to a usage error; or a status when everything is printed already (help, version)."""
    command = typer.main.get_command(build_app(words[0] if words else None))
    names = getattr(command, "commands", {})
    if words and not words[0].startswith("-") and words[0] not in names:
        return _Answer(int(ExitCode.RECIPE), (failure.unknown_command(words[0], names),))
    try:
        made = command.main(args=words, prog_name="ftcli", standalone_mode=False)
    except TyperException as error:
        return _Answer(int(ExitCode.RECIPE), (failure.usage_finding(error, words),))
    except SystemExit as end:  # typer's way to end when it completes for a shell, or installs completion
        made = end.code
    if isinstance(made, Invocation):
        return made
    if made == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
        return _interrupted()
    return int(ExitCode.RECIPE) if made else int(ExitCode.OK)


def _run(request: AnyRequest, words: list[str], ctrl_c: _CtrlC) -> _Answer:
    try:
        session, reporter = open_session(request.options, words)
        session = replace(session, on_complete=ctrl_c.complete)
    except FtcliError as error:  # of a variable of the environment
        return _Answer(int(error.exit_code), error.findings)
    try:
        stdout = nullcontext() if request.owns_stdout else results_only_on_stdout()
        with stdout, library_environment(session), fewer_library_warnings(session):
            result = request.action(session)
        text = _text_of(result, request)
    except BaseException as error:  # noqa: BLE001 - the one place where everything ends, with a status of ours
        failed = failure.failure_of(error, command=session.command, debug=session.debug)
        tells = failure.is_told_by(session.place, error)
        return _Answer(failed.exit_code, failed.findings, tuple(reporter.findings), told_by_us=tells)
    status = int(ExitCode.OK) if request.exit_code is None else request.exit_code(result)
    return _Answer(status, (), tuple(reporter.findings), result, text, session.place is None or session.place.leads)


def _text_of(result: object, request: AnyRequest) -> str | None:
    if isinstance(result, EndedElsewhere) or (request.options.json and not request.raw):
        return None
    text = request.render(result) if request.render is not None else render.result_text(result)
    return text if request.verbatim or request.raw else render.terminal_text(text)


def _tell(answer: _Answer, *, command: str | None, json: bool) -> None:
    """Findings to stderr and the result to stdout; with `json` the document to stdout instead of the result."""
    _tell_people(answer.findings)
    if json:
        findings = (*answer.told, *answer.findings)
        typer.echo(render.document(command, answer.exit_code, findings, answer.result))
    elif answer.text:
        typer.echo(answer.text, color=True)


def _tell_people(findings: Sequence[Finding]) -> None:
    if findings:
        stderr = unfailing(sys.stderr)
        print(render.findings_text(findings, style_for(sys.stderr), _MOST_SHOWN), file=stderr)


def _interrupted() -> int:
    _tell_people([Finding("FT191", "interrupted", severity="note")])
    return int(ExitCode.INTERRUPTED)


def _forgive_encodings() -> None:
    """A terminal or log that cannot show a character shows its escape instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
