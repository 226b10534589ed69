"""`ftcli recipes convert`: another tool's recipe in, ours out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from ftcli.cli import options
from ftcli.cli.files import file_content
from ftcli.cli.request import AnyRequest, Invocation
from ftcli.errors import FtcliError, Origin
from ftcli.paths import expanded
from ftcli.reporting import Session
from ftcli.tables import dialects


@dataclass(frozen=True, slots=True)
class ConvertedRecipe:
    """The answer of `ftcli recipes convert`: whose recipe it was, and ours as YAML."""

    dialect: str
    recipe: str


def _tools(incomplete: str) -> list[str]:
    return [name for name in dialects.names() if name.startswith(incomplete)]


def convert(
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
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Turn another tool's recipe into one of ftcli.

    Writes the recipe to stdout. What has no counterpart, and what means something else here, is listed on stderr.

    \b
    Examples:
      ftcli recipes convert axolotl.yml > mine.yaml
      ftcli recipes convert train.sh --from trl > mine.yaml
    """

    def action(session: Session) -> ConvertedRecipe:
        from ftcli.config.conversion import convert as converted

        _require_known(dialect)
        made = converted(expanded(file), dialect)
        for finding in made.findings:
            session.reporter.finding(finding)
        return ConvertedRecipe(made.dialect, made.text)

    def shown(result: ConvertedRecipe) -> str:
        return file_content(result.recipe)

    return Invocation("recipes convert", options.common(json, quiet, False, debug), action, shown, verbatim=True)


def _require_known(dialect: str | None) -> None:
    if dialect is None or dialect in dialects.names():
        return
    raise FtcliError.single(
        "FT150",
        f"no tool `{dialect}` is known",
        origin=Origin(f"--from {dialect}"),
        help=f"choose from: {', '.join(dialects.names())}",
    )
