"""`ftcli schema`: what `--json` prints, for programs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ftcli.cli import options
from ftcli.errors import FtcliError, Origin
from ftcli.plain import JsonObject
from ftcli.reporting import Session


@options.command("schema", lambda result: json.dumps(result, indent=2), takes=("json", "debug"), raw=True)
def schema(
    session: Session,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="A command, such as `check` or `recipes list`.")
    ] = None,
) -> JsonObject:
    """Print the JSON Schema of what a command prints with --json; of all commands without one.

    That of recipes is `ftcli recipes schema`.

    \b
    Examples:
      ftcli schema check
      ftcli schema recipes list
    """
    from ftcli.cli.answers import RESULTS, published

    name = " ".join(command or ())
    if name and name not in RESULTS:
        help = f"choose from: {', '.join(RESULTS)}"
        raise FtcliError.single(
            "FT151", f"no command `{name}` prints a document", origin=Origin("command line"), help=help
        )
    return published(name or None)
