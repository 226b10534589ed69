"""Renders conversations by the tokenizer's chat template and finds the assistant's characters in the result.

One rendering serves training, evaluation, GRPO and export: :class:`Renderer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from ftcli.assets import asset
from ftcli.data.formats import Message
from ftcli.data.load import Row, data_error
from ftcli.errors import ExitCode, FtcliError, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text of one example and the half-open character ranges that the model is to learn."""

    text: str
    spans: tuple[tuple[int, int], ...]


class Renderer:
    """A tokenizer's chat template, checked.

    Args:
        tokenizer: Its own template is used unless ``template`` names another.
        template: A ``.jinja`` file or the name of one in ftcli's assets.

    Raises:
        FtcliError: FT421 when a conversation is to be rendered and there is no template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = read_template(template) if template is not None else None

    @property
    def source(self) -> str | None:
        """The template's text: what is fingerprinted, and saved beside an export."""
        template = self._template or self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def text(self, messages: Sequence[Message], row: Row, *, generation_prompt: bool = False) -> str:
        """``messages`` as the model sees them. Raises FtcliError FT422 with the template's own words."""
        if not self._template and not self._tokenizer.chat_template:
            raise FtcliError.single(
                "FT421",
                "the tokenizer has no chat template, so a conversation has no defined text",
                exit_code=ExitCode.DATA,
                origin=row.origin,
                help="name one with data.chat_template, or train on rows of format prompt_completion or text",
            )
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except TemplateError as error:
            raise data_error(
                "FT422",
                f"the chat template refuses this conversation: {error}",
                row.origin,
                help=_role_help(messages),
            ) from error
        return str(rendered)

    def conversation(self, messages: Sequence[Message], row: Row) -> Rendered:
        """The whole conversation with the assistant's turns marked.

        A turn is what the template adds between the prompt for it (with the generation prompt) and the text that
        includes it. Raises FtcliError FT423 when the template rewrites earlier turns, so that no such text exists.
        """
        full = self.text(messages, row)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            before = self.text(messages[:index], row, generation_prompt=True)
            after = self.text(messages[: index + 1], row) if index + 1 < len(messages) else full
            if not after.startswith(before) or not full.startswith(after):
                raise data_error(
                    "FT423",
                    f"the chat template rewrites the conversation before turn {index + 1}, so training would see "
                    "another text than generation does",
                    row.origin,
                    help="split the conversation into single turns, or use a prefix-preserving template",
                )
            spans.append((len(before), len(after)))
        return Rendered(full, tuple(spans))


def read_template(name: str) -> str:
    """Text of a template file, or of the bundled template of that name. Raises FtcliError FT424."""
    path = Path(name) if name.endswith((".jinja", ".j2")) else asset("templates", f"{name}.jinja")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FtcliError.single(
            "FT424",
            f"data.chat_template: {path} cannot be read: {error}",
            exit_code=ExitCode.RECIPE,
            origin=Origin(name),
        ) from error


def _role_help(messages: Sequence[Message]) -> str | None:
    if any(message["role"] == "system" for message in messages):
        return "this model's template may have no system role: move that text into the first user message"
    return "user and assistant must alternate, starting with the user"
