"""The loop of `ftcli chat` in a terminal: a line is asked, its answer appears while it is generated."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, TextIO

from ftcli.cli.render import Style, findings_text, terminal_text
from ftcli.cli.streams import unfailing
from ftcli.errors import ExitCode, FtcliError

if TYPE_CHECKING:
    from ftcli.pipeline.chatting import Chat, ChatAnswer
    from ftcli.reporting import Reporter

_HELP = "/reset starts over, /exit or Ctrl-D quits; Ctrl-C stops an answer, and quits at the prompt"


def talk(chat: Chat, reporter: Reporter, out: TextIO, style: Style, read: Callable[[], str] | None = None) -> None:
    """Asks and answers until ``/exit`` or the end of what is typed.

    Args:
        read: Gives a line, or raises EOFError at the end; None reads the terminal.

    Raises:
        KeyboardInterrupt: Ctrl-C where no answer is generated, or a second one while an answer is being stopped.
        FtcliError: whatever is not about the line that was typed.
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
