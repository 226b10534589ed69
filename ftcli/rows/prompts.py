"""Rows as prompts to answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ftcli.errors import ExitCode, Finding, FtcliError
from ftcli.plain import JsonObject
from ftcli.rows.layouts import layout_of, misfit_finding, understand
from ftcli.rows.layouts.messages import switches_of, tools_of, with_images
from ftcli.rows.layouts.prompted import as_chat, is_bare
from ftcli.rows.row import IMAGE, Example, ImageSource, Message, Misfit, Row, Switches, data_error, raise_findings


@dataclass(frozen=True, slots=True)
class Prompt:
    """The question to a model: a chat or a string; ``reference`` is the known answer, if the row has one.

    ``tools``, ``switches``, ``value`` and ``images`` are those of :class:`ftcli.rows.row.Example`.
    """

    row: Row
    messages: tuple[Message, ...] | None
    text: str | None
    reference: str | None
    tools: tuple[JsonObject, ...] | None = None
    switches: Switches = field(default_factory=dict)
    value: float = 0.0
    images: tuple[ImageSource, ...] = ()

    def followed_by(self, more: str) -> Prompt:
        """The prompt with ``more`` at the end of its last turn."""
        if self.messages is None:
            return replace(self, text=f"{self.text}{more}")
        last = self.messages[-1]
        turns = (*self.messages[:-1], {**last, "content": f"{last.get('content') or ''}{more}"})
        return replace(self, messages=turns)


def to_prompt(example: Example) -> Prompt:
    """The example without its last answer, which becomes the reference; of a pair without both answers.

    Raises FtcliError FT413 for plain text (nothing separates question and answer) and for chats that do not end
    with the assistant.
    """
    if example.messages is not None:
        last = example.messages[-1]
        if last["role"] != "assistant" or len(example.messages) < 2:
            message = "the conversation does not end with an assistant's answer"
            raise data_error("FT413", message, example.row.origin, "end it with the answer, or remove the row")
        asked_of = example.messages[: example.completion_from if example.others else -1]
        answer = str(last["content"])
        shown = example.images[: sum(str(message["content"]).count(IMAGE) for message in asked_of)]
        return Prompt(example.row, asked_of, None, answer, example.tools, example.switches, example.value, shown)
    if example.prompt_text is None or example.text is None:
        message = "plain text has no answer to compare with"
        raise data_error("FT413", message, example.row.origin, "use rows of messages, or of prompt and answer")
    answer = example.text.removeprefix(example.prompt_text)
    return Prompt(example.row, None, example.prompt_text, answer, value=example.value)


def prompts_of(rows: Sequence[Row], requested: str) -> list[Prompt]:
    """Prompts for generation and GRPO: rows with only ``prompt`` (string or messages), or any trainable layout.

    Raises FtcliError: FT411 when no layout fits, FT412 for rows that do not fit it, FT413 as :func:`to_prompt`, and
    FT414 for a prompt that is neither string nor messages; every such row is named.
    """
    return _collected(rows, prompt_maker(rows[0], requested))


def prompt_maker(first: Row, requested: str) -> Callable[[Row], Prompt]:
    """A function that makes a prompt of a row, by the columns of the first one; it raises FtcliError as
    :func:`prompts_of`.

    Raises FtcliError FT411 when no layout fits.
    """
    if is_bare(first, requested):
        return _bare_prompt
    layout = layout_of(first, requested)

    def made(row: Row) -> Prompt:
        try:
            example = understand(row, layout)
        except Misfit as misfit:
            raise FtcliError([misfit_finding(row, misfit, layout)], ExitCode.DATA) from misfit
        return to_prompt(example)

    return made


def _collected(items: Sequence[Row], convert: Callable[[Row], Prompt]) -> list[Prompt]:
    """Every item as a prompt. Raises FtcliError with what is wrong with all of them."""
    prompts: list[Prompt] = []
    findings: list[Finding] = []
    for item in items:
        try:
            prompts.append(convert(item))
        except FtcliError as error:
            findings += error.findings
    raise_findings(findings)
    return prompts


def _bare_prompt(row: Row) -> Prompt:
    try:
        messages, images = with_images(row, as_chat(row.fields.get("prompt")))
        return Prompt(row, messages, None, None, tools_of(row), switches_of(row), images=images)
    except Misfit as misfit:
        raise data_error("FT414", str(misfit), row.origin, "make it a text, or a list of {role, content}") from misfit
