"""`ftcli recipes`: the recipes that ship with the package, and the schema of all recipes."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from ftcli.cli import completion, options, render
from ftcli.cli.commands import convert, new
from ftcli.cli.files import file_content, write_new
from ftcli.cli.request import AnyRequest, Invocation
from ftcli.cli.suggest import shipped
from ftcli.errors import FtcliError, Origin
from ftcli.paths import expanded, is_folder
from ftcli.plain import JsonObject
from ftcli.reporting import Session

_EPILOG = (
    "\b\nExamples:\n"
    "  ftcli recipes list\n"
    "  ftcli recipes show gemma2-9b\n"
    "  ftcli recipes copy gemma2-9b my-recipe.yaml\n"
    "  ftcli recipes schema > recipe.schema.json\n"
    "  ftcli recipes new --model google/gemma-2-2b --data my.jsonl --gpu rtx4090 --method lora\n"
    "  ftcli recipes convert axolotl.yml > mine.yaml\n"
)

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A recipe's name, as `ftcli recipes list` has it.",
        show_default=False,
        autocompletion=completion.shipped_recipes,
    ),
]


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """A shipped recipe: its name, its first line and its file."""

    name: str
    about: str
    path: str


@dataclass(frozen=True, slots=True)
class ShippedRecipes:
    """The answer of `ftcli recipes list`."""

    recipes: Sequence[ShippedRecipe]


@dataclass(frozen=True, slots=True)
class ShownRecipe:
    """The answer of `ftcli recipes show`."""

    name: str
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class CopiedRecipe:
    """The answer of `ftcli recipes copy`: ``path`` is the new file."""

    name: str
    path: str


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

    for command in (list_, show, copy, schema, new.new, convert.convert):
        app.command(command.__name__.rstrip("_"), context_settings=dict(context_settings))(command)
    return app


def list_(json: options.JsonOption = False, debug: options.DebugOption = False) -> AnyRequest:
    """List the recipes that ship with ftcli."""

    def action(_: Session) -> ShippedRecipes:
        return ShippedRecipes([ShippedRecipe(path.stem, _about(path), str(path)) for path in shipped().values()])

    def shown(result: ShippedRecipes) -> str:
        width = max((len(entry.name) for entry in result.recipes), default=0)
        return "\n".join(f"{entry.name:<{width}}  {entry.about}".rstrip() for entry in result.recipes)

    return Invocation("recipes list", options.common(json, False, False, debug), action, shown)


def show(name: NameArgument, json: options.JsonOption = False, debug: options.DebugOption = False) -> AnyRequest:
    """Print a recipe."""

    def action(_: Session) -> ShownRecipe:
        path = find(name)
        return ShownRecipe(path.stem, str(path), path.read_text(encoding="utf-8"))

    def shown(result: ShownRecipe) -> str:
        return file_content(result.text)

    return Invocation("recipes show", options.common(json, False, False, debug), action, shown, verbatim=True)


def copy(
    name: NameArgument,
    destination: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]", help="Where to write it; by default NAME.yaml in this folder.", show_default=False
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Copy a recipe to a file of your own."""

    def action(_: Session) -> CopiedRecipe:
        source = find(name)
        target = expanded(destination) if destination is not None else Path(source.name)
        if is_folder(target):
            target = target / source.name
        write_new(source.read_text(encoding="utf-8"), target, force=force)
        return CopiedRecipe(source.stem, str(target))

    def shown(result: CopiedRecipe) -> str:
        return f"wrote {result.path}; next: ftcli check {result.path}"

    return Invocation("recipes copy", options.common(json, False, False, debug), action, shown, owns_stdout=True)


def schema(json: options.JsonOption = False, debug: options.DebugOption = False) -> AnyRequest:
    """Print the JSON Schema of recipes, and nothing else, so that editors can complete and check them."""

    def action(_: Session) -> JsonObject:
        from ftcli.config.schema import published

        return published()

    def shown(result: JsonObject) -> str:
        return json_module.dumps(result, indent=2)

    return Invocation("recipes schema", options.common(json, False, False, debug), action, shown, raw=True)


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
