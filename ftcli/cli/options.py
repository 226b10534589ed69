"""The request of a parsed command line, run later in the one place that maps errors to exit statuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeAlias, TypeVar

import typer

from ftcli.cli import names
from ftcli.errors import FtcliError, Origin
from ftcli.paths import OPEN_IT, RECIPE_SUFFIXES, RUN_RECIPE, expanded, is_file, is_folder, why_closed
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.config.load import LoadedRecipe, Override


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The options that every command takes."""

    json: bool = False
    quiet: bool = False
    offline: bool = False
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Invocation(Generic[R]):
    """One invocation: ``action`` does the work with a session, and ``render`` makes text of its result (None: aligned
    keys and values).

    ``raw`` results are printed as rendered even with ``--json``; ``exit_code`` is the status that a result stands for;
    ``verbatim`` texts are written as they are, since what steers a terminal is out of them, or they are a file's
    content; under ``owns_stdout`` the action itself keeps the libraries' output off stdout.
    """

    command: str
    options: CommonOptions
    action: Callable[[Session], R]
    render: Callable[[R], str] | None = None
    raw: bool = False
    verbatim: bool = False
    exit_code: Callable[[R], int] | None = None
    owns_stdout: bool = False


@dataclass(frozen=True, slots=True)
class EndedElsewhere:
    """A command has run in other processes, one of which has told what came of it, with this exit status."""

    exit_code: int


AnyRequest: TypeAlias = Invocation[Any]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="The recipe, a YAML file.",
        show_default=False,
        autocompletion=names.recipe_files,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set one value of the recipe, as in train.learning_rate=1e-4. Repeatable.",
        show_default=False,
    ),
]
OutputDirOption = Annotated[
    str | None, typer.Option("--output-dir", metavar="DIR", help="The run directory (run.output_dir).")
]
MaxStepsOption = Annotated[
    str | None, typer.Option("--max-steps", metavar="N", help="Stop after N optimizer steps (train.max_steps).")
]
ResumeOption = Annotated[
    str | None,
    typer.Option("--resume", metavar="auto|never|PATH", help="Continue a run, or start over (run.resume)."),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus", metavar="N|auto", help="Train on N GPUs, or on all that are visible (launch.num_processes)."
    ),
]
DryRewardsOption = Annotated[
    bool, typer.Option("--dry-rewards", help="Only score sample texts for some rows: known answers and others.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="STEP|best", help="A checkpoint of the run in place of its result."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else on stderr.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and problems.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use no network.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


_COMMON: Mapping[str, Any] = {
    "json": JsonOption, "quiet": QuietOption, "offline": OfflineOption, "debug": DebugOption,
}  # fmt: skip


def command(
    name: str,
    render: Callable[[Any], str] | None = None,
    *,
    takes: Sequence[str] = tuple(_COMMON),
    exit_code: Callable[[Any], int] | None = None,
    raw: bool = False,
    verbatim: bool = False,
    owns_stdout: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., AnyRequest]]:
    """Makes a command of a function of the session and of its own options: it takes these and, of the common ones,
    those in ``takes``. All else as :class:`Invocation` has it.
    """

    def made(action: Callable[..., Any]) -> Callable[..., AnyRequest]:
        action.__annotations__.pop("return")  # types of results are loaded when a command runs
        signature = inspect.signature(action, eval_str=True)
        _, *own = signature.parameters.values()
        common = [inspect.Parameter(each, own_kind, default=False, annotation=_COMMON[each]) for each in takes]

        def invoke(**given: Any) -> AnyRequest:
            chosen = CommonOptions(**{each: given.pop(each) for each in takes})
            work = partial(action, **given)
            return Invocation(name, chosen, work, render, raw, verbatim, exit_code, owns_stdout)

        invoke.__name__, invoke.__doc__ = action.__name__, action.__doc__
        invoke.__signature__ = signature.replace(parameters=[*own, *common])  # type: ignore[attr-defined]
        return invoke

    own_kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return made


def overrides(
    assignments: Sequence[str] | None,
    *,
    output_dir: str | None = None,
    max_steps: str | None = None,
    resume: str | None = None,
    gpus: int | None = None,
    formats: Sequence[str] | None = None,
) -> tuple[Override, ...]:
    """Everything on the command line that changes the recipe, in the order in which it is applied.

    The short options come last: ``--max-steps 5`` wins over ``--set train.max_steps=9``.
    """
    from ftcli.config.load import Override

    made = [Override(text=text, label=f"--set {text}") for text in assignments or ()]
    for key, option, value in (
        ("run.output_dir", "--output-dir", output_dir),
        ("run.resume", "--resume", resume),
        ("train.max_steps", "--max-steps", max_steps),
    ):
        if value is not None:
            text = f"{key}={value}" if key == "train.max_steps" else f"{key}={_quoted(value)}"
            made.append(Override(text=text, label=f"{option} {value}"))
    if gpus is not None:
        made.append(Override(text=f"launch.num_processes={gpus}", label=f"--gpus {gpus}"))
    if formats:
        text = f"export.formats=[{', '.join(map(_quoted, formats))}]"
        made.append(Override(text=text, label=f"--format {' --format '.join(formats)}"))
    return tuple(made)


def load(path: str, changes: Sequence[Override]) -> LoadedRecipe:
    """Read a recipe and its overrides. Raises FtcliError with every finding of the stage that failed."""
    from ftcli.config.load import load_recipe

    try:
        return load_recipe(expanded(path), changes)
    except FtcliError as error:
        raise _advised(error, expanded(path)) from error


def _advised(error: FtcliError, path: Path) -> FtcliError:
    """A recipe that is not there (FT101), with what was probably meant."""
    from ftcli.cli.names import is_shipped, recipe_meant, run_meant

    finding = error.findings[0]
    nearby = (finding.help or "").startswith("did you mean") and not is_shipped(path.stem)
    if finding.code != "FT101" or nearby:
        return error
    meant = recipe_meant(path)
    if meant is None and path.suffix not in RECIPE_SUFFIXES:
        meant = run_meant(path)
        if meant is None and is_folder(path.parent):
            meant = f"{finding.help}; `ftcli runs {path.parent}` shows the runs in that folder"
    return FtcliError([replace(finding, help=meant or finding.help)], error.exit_code)


def named(path: str | None, option: str) -> Path | None:
    """The path that an option names, if it is given. Raises FtcliError FT150 where it names nothing: `"$OUT"` of a
    variable that is not set would be the working folder.
    """
    if path is not None and not path.strip():
        message, help = "that names nothing", "name a file or folder, or leave the option out"
        raise FtcliError.single("FT150", message, origin=Origin(f"{option} '{path}'"), help=help)
    return None if path is None else expanded(path)


def run_directory(path: str, label: str) -> Path:
    """`path`, which must be a run directory. Raises FtcliError FT154 (exit RECIPE) where it holds no recipe.yaml, or
    nobody can say whether it does.
    """
    folder = expanded(path)
    if not is_file(folder / RUN_RECIPE):
        from ftcli.cli.names import run_meant

        closed, meant = why_closed(folder), run_meant(folder)
        if closed is not None:
            problem = f"cannot be read: {closed}"
            meant = OPEN_IT
        else:
            there = is_folder(folder)
            problem = "holds no recipe.yaml, so it is not a run directory" if there else "is not a directory"
        message = f"{path} {problem}"
        help = meant or "name the directory that `ftcli train` wrote, as in runs/smoke"
        raise FtcliError.single(
            "FT154", message, origin=Origin(f"{label} {path}" if label.startswith("-") else label), help=help
        )
    return folder


def without_run(checkpoint: str) -> FtcliError:
    """FT154: a checkpoint was named, and no run."""
    message = f"--checkpoint {checkpoint} needs a run"
    help = "name the run with --run DIR"
    return FtcliError.single("FT154", message, origin=Origin(f"--checkpoint {checkpoint}"), help=help)


def load_run(target: str, changes: Sequence[Override]) -> tuple[LoadedRecipe, Path]:
    """A run's recipe and directory, from the run directory itself or from the recipe that names it."""
    if is_folder(expanded(target)):
        folder = run_directory(target, "command line")
        return load(str(folder / RUN_RECIPE), changes), folder
    loaded = load(target, changes)
    return loaded, Path(str(loaded.recipe.run.output_dir))


def _quoted(text: str) -> str:
    """`text` as a YAML string, so that ``--output-dir 2024`` stays text, and a line break in it a line break."""
    if text.isprintable():
        return "'" + text.replace("'", "''") + "'"
    return (
        '"'
        + "".join(char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in text)
        + '"'
    )
