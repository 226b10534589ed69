"""`ftcli recipes`: the recipes that ship with the package, their schema, new ones, and those of other tools."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import names, options, render
from ftcli.cli.files import file_content, write_new
from ftcli.cli.names import shipped
from ftcli.cli.render import clean
from ftcli.errors import FtcliError, Origin
from ftcli.paths import expanded, is_folder
from ftcli.plain import JsonMap, JsonObject
from ftcli.reporting import Session
from ftcli.tables import dialects

if TYPE_CHECKING:
    from ftcli.pipeline.new_recipe import Answers


def _tools(incomplete: str) -> list[str]:
    return [name for name in dialects.names() if name.startswith(incomplete)]


@options.command(
    "recipes convert", lambda result: file_content(result["recipe"]), takes=("json", "quiet", "debug"), verbatim=True
)
def convert(
    session: Session,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="The other tool's recipe: YAML, JSON, a command line, a notebook or a script."
        ),
    ],
    dialect: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="TOOL", help=f"Whose recipe it is: {', '.join(dialects.names())}.", autocompletion=_tools
        ),
    ] = None,
) -> JsonObject:
    """Turn another tool's recipe into one of ftcli.

    Writes the recipe to stdout. What has no counterpart, and what means something else here, is listed on stderr.

    \b
    Examples:
      ftcli recipes convert axolotl.yml > mine.yaml
      ftcli recipes convert train.sh --from trl > mine.yaml
    """

    from ftcli.config.conversion.convert import convert as converted

    if dialect is not None and dialect not in dialects.names():
        message, help = f"no tool `{dialect}` is known", f"choose from: {', '.join(dialects.names())}"
        raise FtcliError.single("FT150", message, origin=Origin(f"--from {dialect}"), help=help)
    made = converted(expanded(file), dialect)
    for finding in made.findings:
        session.reporter.finding(finding)
    return {"dialect": made.dialect, "recipe": made.text}


def _wrote(result: JsonMap) -> str:
    return f"wrote {result['path']}; next: ftcli check {result['path']}"


#: Each option with its question, and what Enter means.
_QUESTIONS = {
    "--model": ("Which model? A Hub id, a folder, or bundled:tiny-gemma2 to try things out", "bundled:tiny-gemma2"),
    "--data": ("Your data? Files (.jsonl, .csv, …) or hub:ORG/NAME, separated by commas", "bundled:sample-chat"),
    "--gpu": ("For which GPU, or how much memory? This machine's, or for example rtx4090, h100, 24GiB or cpu", "here"),
    "--method": ("How? lora, qlora (least memory), auto (what fits), full (all weights) or grpo (by rewards)", "auto"),
}


@options.command("recipes new", _wrote, owns_stdout=True)
def new(
    session: Session,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Hub id, folder or bundled:NAME.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option("--data", metavar="FILE", help="Rows to train on, or hub:ORG/NAME. Repeatable.")
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option("--eval", metavar="FILE", help="Held-out rows. Repeatable.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="GPU", help="A GPU, a size such as 24GiB, or `here`.", autocompletion=names.gpus),
    ] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="M", help="auto, lora, qlora, full or grpo.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="FILE", help="Where to write it; by default MODEL-METHOD.yaml in this folder."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> JsonObject:
    """Write a recipe from four answers.

    Asks for model, data, GPU and method, unless the options say them. The recipe passes `ftcli check` for that GPU.

    \b
    Examples:
      ftcli recipes new
      ftcli recipes new --model google/gemma-2-2b-it --data my.jsonl --gpu here --method auto
      ftcli recipes new --model google/gemma-2-2b-it --data my.jsonl --gpu rtx4090 --method lora --output mine.yaml
    """

    from ftcli.pipeline.new_recipe import Answers, new_recipe

    answers = _answered({"--model": model, "--data": ",".join(data or ()) or None, "--gpu": gpu, "--method": method})
    made = Answers(
        model=answers["--model"],
        data=tuple(data) if data else _parts(answers["--data"]),
        held_out=tuple(held_out or ()),
        gpu=answers["--gpu"],
        method=_known_method(answers["--method"]),
    )
    target = options.named(output, "--output") or expanded(_file_name(made))
    text = new_recipe(made, target, offline=session.offline)
    write_new(text, target, force=force)
    return {"path": str(target), "recipe": text}


def _answered(said: dict[str, str | None]) -> dict[str, str]:
    """All answers, those that the options do not have asked for on a terminal.

    Raises FtcliError FT150 (exit 2) where nobody can be asked.
    """
    missing = [name for name, value in said.items() if value is None]
    if missing and not sys.stdin.isatty():
        message = f"there is no terminal to ask on, and no {', '.join(missing)}"
        help = "give each answer as an option: `ftcli recipes new --help`"
        raise FtcliError.single("FT150", message, origin=Origin("command line"), help=help)
    return {name: value if value is not None else _ask(*_QUESTIONS[name]) for name, value in said.items()}


def _ask(question: str, default: str) -> str:
    """The answer to a question, which stands on stderr; Enter is the default."""
    print(f"{question} [{default}]: ", end="", file=sys.stderr, flush=True)  # noqa: T201 - a question, not a result
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)  # noqa: T201
        help = "Enter takes the value in brackets; `ftcli recipes new --help` has the options"
        raise FtcliError.single("FT150", "the questions were not answered", origin=Origin("command line"), help=help)
    return clean(line).strip() or default


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _known_method(word: str) -> str:
    from ftcli.pipeline.new_recipe import METHODS

    if word.lower() in METHODS:
        return word.lower()
    help = f"choose from: {', '.join(METHODS)}"
    raise FtcliError.single("FT150", f"no method `{word}`", origin=Origin(f"--method {word}"), help=help)


def _file_name(answers: Answers) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", answers.model.removeprefix("bundled:").rstrip("/").rpartition("/")[2])
    return f"{name.strip('.-').lower() or 'recipe'}-{answers.method}.yaml"


_EPILOG = (
    "\b\nExamples:\n"
    "  ftcli recipes list\n"
    "  ftcli recipes show gemma2-9b\n"
    "  ftcli recipes copy gemma2-9b my-recipe.yaml\n"
    "  ftcli recipes schema > recipe.schema.json\n"
    "  ftcli recipes new --model google/gemma-2-2b-it --data my.jsonl --gpu rtx4090 --method lora\n"
    "  ftcli recipes convert axolotl.yml > mine.yaml\n"
)

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A recipe's name, as `ftcli recipes list` has it.",
        show_default=False,
        autocompletion=names.shipped_recipes,
    ),
]


def build_app(context_settings: Mapping[str, int | list[str]]) -> typer.Typer:
    """The subcommands of `ftcli recipes`."""
    app = typer.Typer(
        help="Shipped recipes, new ones, and those of other tools.",
        epilog=_EPILOG,
        rich_markup_mode=None,
        context_settings=dict(context_settings),
    )

    @app.callback(invoke_without_command=True)
    def root(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())
            raise typer.Exit

    for command in (list_, show, copy, schema, new, convert):
        app.command(command.__name__.rstrip("_"), context_settings=dict(context_settings))(command)
    return app


def _list_text(result: JsonMap) -> str:
    width = max((len(entry["name"]) for entry in result["recipes"]), default=0)
    return "\n".join(f"{entry['name']:<{width}}  {entry['about']}".rstrip() for entry in result["recipes"])


@options.command("recipes list", _list_text, takes=("json", "debug"))
def list_(session: Session) -> JsonObject:
    """List the recipes that ship with ftcli."""
    found = shipped().values()
    return {"recipes": [{"name": path.stem, "about": _about(path), "path": str(path)} for path in found]}


@options.command("recipes show", lambda result: file_content(result["text"]), takes=("json", "debug"), verbatim=True)
def show(session: Session, name: NameArgument) -> JsonObject:
    """Print a recipe."""
    path = find(name)
    return {"name": path.stem, "path": str(path), "text": path.read_text(encoding="utf-8")}


@options.command("recipes copy", _wrote, takes=("json", "debug"), owns_stdout=True)
def copy(
    session: Session,
    name: NameArgument,
    destination: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", help="Where to write it; by default NAME.yaml in this folder.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> JsonObject:
    """Copy a recipe to a file of your own."""
    source = find(name)
    target = options.named(destination, "FILE") or Path(source.name)
    if is_folder(target):
        target = target / source.name
    write_new(source.read_text(encoding="utf-8"), target, force=force)
    return {"name": source.stem, "path": str(target)}


@options.command("recipes schema", lambda result: json.dumps(result, indent=2), takes=("json", "debug"), raw=True)
def schema(session: Session) -> JsonObject:
    """Print the JSON Schema of recipes, and nothing else, so that editors can complete and check them."""
    from ftcli.config.schema import published

    return published()


def find(name: str) -> Path:
    """The shipped recipe of this name. Raises FtcliError FT152 (exit RECIPE) where there is none."""
    recipes = shipped()
    stem = Path(name).name.removesuffix(".yaml").removesuffix(".yml")
    if stem in recipes:
        return recipes[stem]
    near = get_close_matches(stem, recipes, n=1, cutoff=0.5)
    help = f"did you mean {near[0]}?" if near else f"choose from: {', '.join(recipes)}"
    raise FtcliError.single("FT152", f"no recipe `{name}` ships with ftcli", origin=_COMMAND_LINE, help=help)


_COMMAND_LINE = Origin("command line")


def _about(path: Path) -> str:
    """The first comment line of a recipe."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and line.strip("# "):
            return render.clean(line.lstrip("#").strip())
        if line.strip() and not line.startswith("#"):
            break
    return ""
