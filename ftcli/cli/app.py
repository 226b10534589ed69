"""The `ftcli` command: parses, runs, and maps every outcome to text and an exit status in one place.

What ends a command becomes findings and an exit status: every exception, and command lines that cannot be parsed, told
with what was probably meant (FT150, FT151).
"""

from __future__ import annotations

import errno
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from ftcli import __version__
from ftcli.cli import environment, render
from ftcli.cli.commands import (
    bench,
    chat,
    check,
    doctor,
    evaluate,
    export,
    mcp,
    recipes,
    runs,
    sample,
    schema,
    serve_check,
    sweep,
)
from ftcli.cli.commands.train import training_command
from ftcli.cli.names import is_run, is_shipped
from ftcli.cli.options import AnyRequest, EndedElsewhere, Invocation
from ftcli.cli.render import terminal_text
from ftcli.errors import ExitCode, Finding, FtcliError, Origin, Unwinding, first_line, is_out_of_memory, said_of
from ftcli.paths import RECIPE_SUFFIXES
from ftcli.ranks import Place
from ftcli.run.heartbeat import RankLost
from ftcli.tables import methods


def failure_of(error: BaseException, *, command: Sequence[str], debug: bool) -> FtcliError:
    """An FtcliError stays as it is; Ctrl-C, lack of memory and a full disk have their own codes; all else is a bug,
    whose traceback is printed with `debug`, and written to a file otherwise.
    """
    if isinstance(error, FtcliError):
        return error
    if _is_interruption(error):
        return FtcliError([Finding("FT191", "interrupted", severity="note")], ExitCode.INTERRUPTED)
    if is_out_of_memory(error):
        help = (
            "lower train.per_device_train_batch_size or data.max_seq_len, or set train.gradient_checkpointing: true; "
            "`ftcli check` estimates what fits, and `ulimit -v` shows whether the shell allows less"
        )
        message = f"out of memory: {said_of(error)[:300]}"
        return FtcliError.single("FT192", message, help=help, exit_code=ExitCode.OUT_OF_MEMORY)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        message, help = f"no space left on the disk{where}", "free some space; `ftcli train` continues the run"
        return FtcliError.single("FT193", message, help=help, exit_code=ExitCode.PREFLIGHT)
    return FtcliError([_bug(error, command, debug)], ExitCode.BUG)


def is_told_by(place: Place | None, error: BaseException) -> bool:
    """True if this process reports an error of several ranks: rank 0 does, and where torchrun has lost it, the next
    one. Ftcli's own launcher reports a lost rank itself.
    """
    if place is None or place.leads:
        return True
    if place.folder is not None or not isinstance(error, RankLost) or 0 not in error.ranks:
        return False
    return place.rank == min(set(range(place.size)) - set(error.ranks))


def _is_interruption(error: BaseException) -> bool:
    """True for Ctrl-C, and for the RuntimeError that transformers raises when Ctrl-C interrupts its import."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt | Unwinding):
            return True
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return False


def _bug(error: BaseException, command: Sequence[str], debug: bool) -> Finding:
    text = "".join(traceback.format_exception(error))
    message = f"this is a bug in ftcli: {type(error).__name__}: {first_line(error)[:300]}"
    if debug:
        print(terminal_text(text), file=sys.stderr)  # noqa: T201
        return Finding("FT190", message, help="please report it with the traceback above")
    path = _crash_file(text, command)
    kept = f"the traceback is in {path}; please report it" if path is not None else "run it again with --debug"
    return Finding("FT190", message, help=kept)


def _crash_file(text: str, command: Sequence[str]) -> Path | None:
    head = f"ftcli {__version__}, Python {platform.python_version()}, {platform.platform()}\n{' '.join(command)}\n\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="ftcli-crash-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as stream:
            stream.write(head + text)
            return Path(stream.name)
    except OSError:
        return None


#: What other tools call our commands.
_OTHER_WORDS: Mapping[str, str] = {
    "finetune": "train", "fine-tune": "train", "fit": "train", "run": "train", "sft": "train", "lora": "train",
    "tune": "train", "evaluate": "eval", "test": "eval", "rl": "grpo", "rlhf": "grpo", "talk": "chat",
    "verify": "serve-check", "serve": "serve-check",
    "rft": "sample", "rejection-sampling": "sample", "best-of-n": "sample", "rollout": "sample", "mine": "sample",
    "ask": "chat", "generate": "chat", "infer": "chat", "inference": "chat", "predict": "chat", "prompt": "chat",
    "merge": "export", "merge-lora": "export", "save": "export", "convert": "recipes convert",
    "import": "recipes convert", "migrate": "recipes convert", "new": "recipes new", "init": "recipes new",
    "wizard": "recipes new",
    "hpo": "sweep", "grid": "sweep", "search": "sweep", "validate": "check", "lint": "check",
    "dry-run": "check", "preflight": "check", "benchmark": "bench", "ls": "recipes list", "list": "recipes list",
    "cp": "recipes copy", "copy": "recipes copy", "show": "recipes show", "cat": "recipes show",
    "config-schema": "recipes schema", "env": "doctor", "info": "doctor",
    "help": "--help", "version": "--version",
}  # fmt: skip


#: How other tools name their configuration, and a GPU.
_OF_RECIPES = frozenset(("config", "config-file", "config_file", "recipe", "file", "c", "f", "cfg", "yaml"))
_OF_DEVICES = frozenset(("gpu", "device", "gpu-type", "gpu_type", "hardware", "for", "on"))
#: An option that is so similar to one of ours was misspelt, though it is the name of a recipe's key as well.
_MISSPELT = 0.8


def unknown_command(word: str, commands: Iterable[str]) -> Finding:
    """FT151 for a first word that is no command."""
    from ftcli.config.secrets import mask

    known = list(commands)
    meant, missing = _OTHER_WORDS.get(word.lower()), methods.not_offered(word)
    near = [meant] if meant else get_close_matches(word.lower(), known, n=1, cutoff=0.5)
    if word.endswith(RECIPE_SUFFIXES):
        help = f"a command comes first: `ftcli train {word}` or `ftcli check {word}`"
    elif is_shipped(word):
        help = f"that is a recipe: `ftcli recipes copy {word}`, then `ftcli train {word}.yaml`"
    elif is_run(word):
        help = f"that is a run: `ftcli export {word}`, `ftcli chat {word}`, `ftcli runs` or `ftcli compare {word} ...`"
    elif missing is not None:
        help = missing
    elif near:
        help = f"did you mean `ftcli {near[0]}`?"
    else:
        help = f"commands: {', '.join(known)}"
    return Finding("FT151", f"no command `{mask(word)}`", Origin("command line"), help)


def usage_finding(error: TyperException, argv: Sequence[str]) -> Finding:
    """FT150 for everything else that the parser refuses."""
    from ftcli.config.secrets import mask

    message = mask(error.format_message()).rstrip(".").replace("'", "`")
    message = message[:1].lower() + message[1:]
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    command = f"ftcli {argv[0]}" if argv and not argv[0].startswith("-") else "ftcli"
    path = context.command_path if context is not None else command
    help = f"`{path} --help` shows what it takes"
    if isinstance(option, str) and "no such option" in message:
        message = f"no option `{option}`"
        help = _option_help(option, getattr(error, "possibilities", None) or (), path) or help
    elif "unexpected extra argument" in message:
        help = _extra_help(argv) or help
    elif "no such command" in message and argv and argv[-1] and is_shipped(argv[-1]):
        help = f"did you mean `ftcli recipes show {argv[-1]}`?"
    return Finding("FT150", message, Origin("command line"), help)


def _option_help(option: str, near: Sequence[str], path: str) -> str | None:
    if path == "ftcli":
        return f"options come after the command, as in `ftcli train RECIPE {option}`"
    name = option.lstrip("-").partition("=")[0]
    if name in _OF_RECIPES:
        return f"the recipe is named without an option: `{path} RECIPE`"
    if name in _OF_DEVICES and path == "ftcli check":
        return "did you mean --as, as in `--as t4`?"
    keys = _keys_named(name)
    likely = get_close_matches(option, near, n=1, cutoff=0.5 if keys else 0.4)
    if likely and not (keys and SequenceMatcher(None, option, likely[0]).ratio() < _MISSPELT):
        return f"did you mean {likely[0]}?"
    return f"values of a recipe are set by --set {keys[0]}=VALUE" if keys else None


def _extra_help(argv: Sequence[str]) -> str | None:
    """For ``ftcli train recipe.yaml lora.r=8``, as other tools have it."""
    loose = [word for before, word in pairwise(argv) if "=" in word and before != "--set"]
    loose = [word for word in loose if not word.startswith("-")]
    runs = [word for word in argv[2:] if is_run(word)]
    if argv[0] == "eval" and runs:
        return f"write --run {runs[0]}"
    return f"write --set {loose[0]}" if loose else None


def _keys_named(name: str) -> list[str]:
    """Recipe keys of this dotted or plain name, or ours for another tool's."""
    from ftcli.config.dialects import foreign
    from ftcli.config.schema import RecipeSchema

    wanted = name.replace("-", "_").lower()
    of_schema = RecipeSchema().keys()
    keys = [key for key in of_schema if "[]" not in key]  # --set takes none of the items of a list
    found = [key for key in keys if wanted in (key, key.rpartition(".")[2])]
    known = foreign("", wanted)
    return found or ([known.key] if known is not None and known.key is not None else [])


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
        "serve-check": serve_check.serve_check,
        "sample": sample.sample,
        "check": check.check,
        "bench": bench.bench,
        "runs": runs.runs,
        "compare": runs.compare,
        "sweep": sweep.sweep,
        "doctor": doctor.doctor,
        "schema": schema.schema,
        "mcp": mcp.mcp,
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
    environment.open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a log that cannot show a character shows its escape
            stream.reconfigure(errors="backslashreplace")
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
    environment.let_go_of_broken_streams()
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
        return _Answer(int(ExitCode.RECIPE), (unknown_command(words[0], names),))
    try:
        made = command.main(args=words, prog_name="ftcli", standalone_mode=False)
    except TyperException as error:
        return _Answer(int(ExitCode.RECIPE), (usage_finding(error, words),))
    except SystemExit as end:  # typer's way to end when it completes for a shell, or installs completion
        made = end.code
    if isinstance(made, Invocation):
        return made
    if made == ExitCode.INTERRUPTED:  # what typer makes of Ctrl-C
        return _interrupted()
    return int(ExitCode.RECIPE) if made else int(ExitCode.OK)


def _run(request: AnyRequest, words: list[str], ctrl_c: _CtrlC) -> _Answer:
    try:
        session, reporter = environment.open_session(request.options, words)
        session = replace(session, on_complete=ctrl_c.complete)
    except FtcliError as error:  # of a variable of the environment
        return _Answer(int(error.exit_code), error.findings)
    try:
        stdout = nullcontext() if request.owns_stdout else environment.results_only_on_stdout()
        with stdout, environment.library_environment(session), environment.fewer_library_warnings(session):
            result = request.action(session)
        text = _text_of(result, request)
    except BaseException as error:  # noqa: BLE001 - the one place where everything ends, with a status of ours
        failed = failure_of(error, command=session.command, debug=session.debug)
        tells = is_told_by(session.place, error)
        return _Answer(int(failed.exit_code), failed.findings, tuple(reporter.findings), told_by_us=tells)
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
        stderr = environment.unfailing(sys.stderr)
        print(render.findings_text(findings, environment.style_for(sys.stderr), _MOST_SHOWN), file=stderr)


def _interrupted() -> int:
    _tell_people([Finding("FT191", "interrupted", severity="note")])
    return int(ExitCode.INTERRUPTED)
