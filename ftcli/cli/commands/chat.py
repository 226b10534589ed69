"""`ftcli chat`: one answer, or a talk in a terminal, where an answer appears while it is generated."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ftcli.cli import names, options
from ftcli.cli.environment import is_terminal, results_only_on_stdout, style_for, unfailing
from ftcli.cli.render import Style, findings_text, terminal_text
from ftcli.errors import ExitCode, FtcliError
from ftcli.reporting import Reporter, Session

if TYPE_CHECKING:
    from ftcli.pipeline.chatting import Chat, ChatAnswer


_HELP = "/reset starts over, /exit or Ctrl-D quits; Ctrl-C stops an answer, and quits at the prompt"


def talk(chat: Chat, reporter: Reporter, out: TextIO, style: Style, read: Callable[[], str] | None = None) -> None:
    """Asks and answers until ``/exit`` or the end of what is typed; ``read`` gives a line, or raises EOFError.

    Raises KeyboardInterrupt for Ctrl-C where no answer is generated, or a second one while an answer is being stopped;
    FtcliError for whatever is not about the line that was typed.
    """
    sampling = chat.sampling
    chosen = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}" if sampling.temperature else "greedy"
    reporter.info(f"{_who(chat)}; {chosen}, at most {sampling.max_new_tokens} new tokens an answer")
    reporter.info(_HELP)
    ask = read or _reader()
    while True:
        try:
            line = ask().strip()
        except EOFError:
            out.write("\n")
            out.flush()
            return
        except UnicodeDecodeError:
            reporter.warn("that was not UTF-8 text")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            chat.conversation.reset()
            reporter.info("a new conversation")
        elif re.fullmatch(r"/\w+", line):
            reporter.info(_HELP)
        elif line:
            _turn(chat, line, reporter, out, style)


def write_pieces(pieces: Generator[str, None, ChatAnswer], out: TextIO | None) -> ChatAnswer:
    """Takes all pieces and writes them, where ``out`` is there, with a line break after the last, however it ends."""
    begun = False
    try:
        while True:
            try:
                piece = next(pieces)
            except StopIteration as end:
                begun = True  # an empty answer is a line as well
                answer: ChatAnswer = end.value
                return answer
            if out is not None:
                begun = True
                out.write(terminal_text(piece))
                out.flush()
    finally:
        if out is not None and begun:
            out.write("\n")
            out.flush()


def _turn(chat: Chat, line: str, reporter: Reporter, out: TextIO, style: Style) -> None:
    pieces = chat.ask(line)
    try:
        answer = write_pieces(pieces, out)
    except KeyboardInterrupt as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # the second one, while the first was being obeyed
            raise
        pieces.close()
        reporter.info("(stopped)")
    except FtcliError as error:
        if error.exit_code != ExitCode.DATA:
            raise
        print(findings_text(error.findings, style), file=unfailing(sys.stderr))
    else:
        if answer.limit is not None:
            reporter.info(f"(ended by {answer.limit})")


def _who(chat: Chat) -> str:
    name = chat.job.recipe.model.name_or_path
    if chat.run is None or chat.base:
        return f"the base model {name}"
    return f"{chat.checkpoint or chat.run}, trained on {name}"


def _reader() -> Callable[[], str]:
    """Lines from the terminal, edited and remembered where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401

    return lambda: input("> ")


#: More than any model reads.
_MOST_BYTES = 16 * 2**20


def _shown(answer: ChatAnswer | None) -> str:
    """The answer, unless it was shown while it was generated."""
    return "" if answer is None or is_terminal(sys.stdout) else terminal_text(answer.completion)


def _asked(prompt: str | None, json: bool) -> str | None:
    """The one text to answer; None where a person talks. Raises FtcliError FT158 (exit 2) when there is none."""
    from ftcli.pipeline.chatting import cannot_chat

    help = 'name it, as in --prompt "What is a river?", or pipe it in'
    if prompt is None and is_terminal(sys.stdin):
        if json:
            raise cannot_chat("--json answers one prompt, and there is none", help, "--json")
        return None
    text = prompt if prompt is not None else _piped()
    if not text.strip():
        where = "--prompt" if prompt is not None else "stdin"
        raise cannot_chat(f"{where} is empty, so there is nothing to answer", help, where)
    return text


def _piped() -> str:
    """All of stdin but the line break that ends it. Raises FtcliError FT158 for what is no text."""
    from ftcli.pipeline.chatting import cannot_chat

    stream = sys.stdin
    if stream is None:
        return ""
    content = stream.buffer.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise cannot_chat(f"stdin holds more than {_MOST_BYTES >> 20} MiB", "ask something shorter", "stdin")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"stdin is not UTF-8 text: byte {error.start + 1} is not part of any character"
        raise cannot_chat(message, "convert it, as with iconv", "stdin") from error
    return text.removesuffix("\n").removesuffix("\r")


def _answer(opened: Chat, asked: str, session: Session, *, live: bool) -> ChatAnswer:
    """One answer; ``live`` shows it on stdout while it is generated."""
    from ftcli.run.signals import stoppable

    with stoppable("answering"), nullcontext() if live else results_only_on_stdout():
        answer = write_pieces(opened.ask(asked), sys.stdout if live else None)
    if answer.limit is not None:
        session.reporter.warn(f"the answer was ended by {answer.limit}")
    return answer


@options.command("chat", _shown, owns_stdout=True)
def chat(
    session: Session,
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_RECIPE",
            help="A run directory, or the recipe that names it.",
            show_default=False,
            autocompletion=names.runs_and_recipes,
        ),
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="Answer this and exit; else stdin or a conversation.")
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Ask the base model instead, to compare.")] = False,
    checkpoint: options.CheckpointOption = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="A system prompt.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="FILE", help="Show it before the first text; may be repeated."),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", metavar="T", min=0.0, max=10.0,
            help="0 takes the likeliest token, the default for --prompt and stdin; 0.7 in a conversation.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", metavar="P", min=0.0001, max=1.0, help="Sample from this share of the probability."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", metavar="N", min=1,
            help="Longest answer in tokens (eval.generate.max_new_tokens; in a conversation at least 512).",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="N", min=0, max=2**63 - 1, help="Of sampling (run.seed; new when conversing)."),
    ] = None,
    set_: options.SetOption = None,
) -> ChatAnswer | None:  # fmt: skip
    """Talk to what was trained.

    Answers appear as they are generated, under the chat template of training. With --prompt, or with a text on stdin,
    one answer is printed.

    \b
    Examples:
      ftcli chat runs/smoke
      ftcli chat runs/smoke --prompt "mirror: kano"
      ftcli chat runs/smoke --prompt "mirror: kano" --base --json
      ftcli chat runs/smoke-vision --image photo.png --prompt "colour?"
      echo "mirror: kano" | ftcli chat recipes/smoke.yaml
    """
    live = is_terminal(sys.stdout) and not session.json

    from ftcli.run.signals import stoppable

    loaded, run_dir = options.load_run(target, options.overrides(set_))
    asked = _asked(prompt, session.json)
    with results_only_on_stdout(), stoppable("loading the model"):
        from ftcli.pipeline.chatting import ChatOptions, open_chat

        shown = tuple(image or ())
        chosen = ChatOptions(asked, base, checkpoint, system, raw, temperature, top_p, max_new_tokens, seed, shown)
        opened = open_chat(loaded, session, run_dir, chosen)
    if asked is not None:
        return _answer(opened, asked, session, live=live)
    talk(opened, session.reporter, sys.stdout, style_for(sys.stderr))
    return None
