"""`ftcli recipes new`: asks four questions, or takes the answers as options."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ftcli.cli import completion, options
from ftcli.cli.files import write_new
from ftcli.cli.render import clean
from ftcli.cli.request import AnyRequest, Invocation
from ftcli.errors import FtcliError, Origin
from ftcli.paths import expanded
from ftcli.reporting import Session

if TYPE_CHECKING:
    from ftcli.pipeline.new_recipe import Answers

#: Each option with its question, and what Enter means.
_QUESTIONS = {
    "--model": ("Which model? A Hub id, a folder, or bundled:tiny-gemma2 to try things out", "bundled:tiny-gemma2"),
    "--data": ("Your data? Files (.jsonl, .csv, …) or hub:ORG/NAME, separated by commas", "bundled:sample-chat"),
    "--gpu": ("For which GPU, or how much memory? For example rtx4090, h100, 24GiB or cpu", "24GiB"),
    "--method": ("How? lora, qlora (least memory), full (all weights) or grpo (by rewards)", "lora"),
}


@dataclass(frozen=True, slots=True)
class WrittenRecipe:
    """The answer of `ftcli recipes new`: the file and its content."""

    path: str
    recipe: str


def new(
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
        typer.Option("--gpu", metavar="GPU", help="A GPU, or a size such as 24GiB.", autocompletion=completion.gpus),
    ] = None,
    method: Annotated[str | None, typer.Option("--method", metavar="M", help="lora, qlora, full or grpo.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="FILE", help="Where to write it; by default MODEL-METHOD.yaml in this folder."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> AnyRequest:
    """Write a recipe from four answers.

    Asks for model, data, GPU and method, unless the options say them. The recipe passes `ftcli check` for that GPU.

    \b
    Examples:
      ftcli recipes new
      ftcli recipes new --model google/gemma-2-2b --data my.jsonl --gpu rtx4090 --method lora --output mine.yaml
    """

    def action(session: Session) -> WrittenRecipe:
        from ftcli.pipeline.new_recipe import Answers, new_recipe

        answers = _answered(
            {"--model": model, "--data": ",".join(data or ()) or None, "--gpu": gpu, "--method": method}
        )
        made = Answers(
            model=answers["--model"],
            data=tuple(data) if data else _parts(answers["--data"]),
            held_out=tuple(held_out or ()),
            gpu=answers["--gpu"],
            method=_known_method(answers["--method"]),
        )
        target = expanded(output if output is not None else _file_name(made))
        text = new_recipe(made, target, offline=session.offline)
        write_new(text, target, force=force)
        return WrittenRecipe(str(target), text)

    def shown(result: WrittenRecipe) -> str:
        return f"wrote {result.path}; next: ftcli check {result.path}"

    return Invocation("recipes new", options.common(json, quiet, offline, debug), action, shown, owns_stdout=True)


def _answered(said: dict[str, str | None]) -> dict[str, str]:
    """All answers, those that the options do not have asked for on a terminal.

    Raises FtcliError FT150 (exit 2) where nobody can be asked.
    """
    missing = [name for name, value in said.items() if value is None]
    if missing and not sys.stdin.isatty():
        raise FtcliError.single(
            "FT150",
            f"there is no terminal to ask on, and no {', '.join(missing)}",
            origin=Origin("command line"),
            help="give each answer as an option: `ftcli recipes new --help`",
        )
    return {name: value if value is not None else _ask(*_QUESTIONS[name]) for name, value in said.items()}


def _ask(question: str, default: str) -> str:
    """The answer to a question, which stands on stderr; Enter is the default."""
    print(f"{question} [{default}]: ", end="", file=sys.stderr, flush=True)  # noqa: T201 - a question, not a result
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)  # noqa: T201
        raise FtcliError.single(
            "FT150",
            "the questions were not answered",
            origin=Origin("command line"),
            help="Enter takes the value in brackets; `ftcli recipes new --help` has the options",
        )
    return clean(line).strip() or default


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _known_method(word: str) -> str:
    from ftcli.pipeline.new_recipe import METHODS

    if word.lower() in METHODS:
        return word.lower()
    raise FtcliError.single(
        "FT150", f"no method `{word}`", origin=Origin(f"--method {word}"), help=f"choose from: {', '.join(METHODS)}"
    )


def _file_name(answers: Answers) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", answers.model.removeprefix("bundled:").rstrip("/").rpartition("/")[2])
    return f"{name.strip('.-').lower() or 'recipe'}-{answers.method}.yaml"
