"""`ftcli mcp`: the commands that look, and on request those that start and stop runs, as tools for coding agents.

It speaks the Model Context Protocol over stdin and stdout; nothing listens on a network. Each tool is a command of
ftcli in a process of its own, and answers with its `--json` document.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ftcli import __version__
from ftcli.cli import options
from ftcli.errors import FtcliError
from ftcli.paths import expanded
from ftcli.plain import JsonObject
from ftcli.reporting import Session

_INSTRUCTIONS = (
    "ftcli fine-tunes language models from YAML recipes. Check a recipe before it is trained: every finding has a code "
    "(docs/errors.md), a place and a remedy (`help`). Exit codes: 0 ok, 2 recipe, 3 machine, 4 data, 5 memory, 6 "
    "diverged, 75 preempted: start the same recipe again. Schemas: recipe_schema, answer_schema."
)
#: A look at a recipe takes no longer.
_SECONDS = 600


@options.command("mcp", takes=("offline", "debug"), owns_stdout=True)
def mcp(
    session: Session,
    allow_runs: Annotated[
        bool, typer.Option("--allow-runs", help="Also offer tools that start and stop runs of this folder.")
    ] = False,
) -> None:
    """Offer ftcli to a coding agent as tools (MCP over stdin and stdout).

    Read-only: check, doctor, recipes, runs, compare and schemas. With --allow-runs also start and stop.
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError as error:
        help = "pip install 'ftcli[mcp]'"
        message = "`ftcli mcp` needs the package mcp, which is not installed"
        raise FtcliError.single("FT253", message, help=help) from error
    server: Any = MCPServer("ftcli", instructions=_INSTRUCTIONS, version=__version__)
    more = ["--offline"] if session.offline else []
    tools = Tools(more)
    reading: tuple[Callable[..., JsonObject], ...] = (
        tools.check, tools.doctor, tools.recipes, tools.recipe, tools.recipe_schema, tools.answer_schema,
        tools.runs, tools.compare,
    )  # fmt: skip
    for tool in reading:
        server.add_tool(tool, annotations=ToolAnnotations(read_only_hint=True))
    if allow_runs:
        server.add_tool(tools.start, annotations=ToolAnnotations(read_only_hint=False))
        server.add_tool(tools.stop, annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    server.run("stdio")


class Tools:
    """The tools; their docstrings are what an agent reads. ``more``: options of every command."""

    def __init__(self, more: list[str]) -> None:
        self._more = more

    def _asked(self, *words: str, common: bool = True, named: Sequence[str] = ()) -> JsonObject:
        """The document of a command; ``named`` are its arguments, which are no options whatever they begin with."""
        import subprocess

        given = [*words, "--json", *(self._more if common else []), "--", *named]
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-m", "ftcli", *given],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        found: JsonObject = json.loads(done.stdout)
        return found

    def check(
        self, recipe: str, settings: list[str] | None = None, gpu: str | None = None, price: str | None = None
    ) -> JsonObject:
        """Say whether a recipe can work: keys, model, data, memory and disk, without building anything.

        settings: `key=value` each, over the recipe. gpu: a GPU such as `h100`, or `all` to compare them. price: of a
        GPU for an hour, which adds time and cost.
        """
        words = [part for each in settings or () for part in ("--set", each)]
        words += [] if gpu is None else ["--as", gpu]
        words += [] if price is None else ["--price", price]
        return self._asked("check", *words, named=[recipe])

    def doctor(self) -> JsonObject:
        """Show what this machine can run, and why not the rest."""
        return self._asked("doctor")

    def recipes(self) -> JsonObject:
        """List the recipes that ship with ftcli."""
        return self._asked("recipes", "list", common=False)

    def recipe(self, name: str) -> JsonObject:
        """Show a recipe that ships with ftcli, to begin from."""
        return self._asked("recipes", "show", common=False, named=[name])

    def recipe_schema(self) -> JsonObject:
        """Give the JSON Schema of recipes."""
        return self._asked("recipes", "schema", common=False)

    def answer_schema(self, command: str) -> JsonObject:
        """Give the JSON Schema of what a command prints with --json."""
        return self._asked("schema", common=False, named=command.split())

    def runs(self, folder: str = "runs") -> JsonObject:
        """List the runs below a folder: state, step, losses and held-out results."""
        return self._asked("runs", common=False, named=[folder])

    def compare(self, runs: list[str]) -> JsonObject:
        """Compare runs: results, curves and the settings that differ."""
        return self._asked("compare", common=False, named=runs)

    def start(self, recipe: str, command: str = "train", settings: list[str] | None = None) -> JsonObject:
        """Start `ftcli train` (or `grpo`) on a recipe, which goes on by itself; `runs` shows how far it is.

        A run that was stopped goes on from its last checkpoint. Returns the process and the file that it writes to.
        """
        import subprocess

        if command not in ("train", "grpo"):
            return {"ok": False, "message": "command is train or grpo"}
        checked = self.check(recipe, settings)
        if not checked["ok"]:
            return checked
        log = Path(f"{Path(recipe).stem}.log").absolute()
        words = [part for each in settings or () for part in ("--set", each)]
        with log.open("ab") as stream:
            started = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-m", "ftcli", command, *words, *self._more, "--", recipe],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        return {"ok": True, "pid": started.pid, "log": str(log)}

    def stop(self, run: str) -> JsonObject:
        """Stop a run of this machine: it finishes its step, writes a checkpoint and ends with 75."""
        import socket

        from ftcli.run.atomic import read_json_object
        from ftcli.run.directory import LOCK_NAME, is_locked

        folder = expanded(run)
        owner = read_json_object(folder / LOCK_NAME)
        pid = owner.get("pid")
        if not is_locked(folder) or not isinstance(pid, int) or owner.get("host") != socket.gethostname():
            return {"ok": False, "message": f"no process of this machine trains in {run}"}
        os.kill(pid, signal.SIGTERM)
        return {"ok": True, "pid": pid}
