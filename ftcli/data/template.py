"""Renders conversations by the tokenizer's chat template and finds the assistant's characters in the result.

One rendering serves training, evaluation, GRPO and export: :class:`Renderer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from ftcli.assets import asset
from ftcli.errors import ExitCode, FtcliError, Origin
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import Example, Message, Row, data_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]]
#: Text that no template holds by itself, to see whether a template shows what it is given.
_PROBE = "ftcli-probe"


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
        FtcliError: FT424 when ``template`` cannot be read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = read_template(template) if template is not None else None
        self._knows_role: dict[str, bool] = {}
        self._bos = _bos_of(tokenizer)

    @property
    def source(self) -> str | None:
        """The template's text: what is fingerprinted, and saved beside a result."""
        template = self._template or self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    @property
    def identity(self) -> str | None:
        """Everything that rendered text depends on: the template (all of them, where a tokenizer has several), and
        today's date if a template shows it."""
        template = self._template or self._tokenizer.chat_template
        if template is None:
            return None
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return f"{text}\n{datetime.now().astimezone().date().isoformat()}" if "strftime_now" in text else text

    def text(
        self, messages: Sequence[Message], row: Row, *, generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """``messages`` as the model sees them.

        Raises FtcliError: FT421 no template, FT422 with the template's own words, FT425 for a role that it lacks, FT426
        when it leaves out a turn, a call or the tools.
        """
        if not self._template and not self._tokenizer.chat_template:
            raise FtcliError.single(
                "FT421",
                "the tokenizer has no chat template, so a conversation has no defined text",
                exit_code=ExitCode.DATA,
                origin=row.origin,
                help="name one with data.chat_template, or train on rows of format prompt_completion or text",
            )
        try:
            text = self._apply(messages, generation_prompt, tools)
        except (TemplateError, TypeError, ValueError) as error:  # templates add, slice and compare what rows hold
            raise self._refusal(messages, row, error) from error
        omitted = _omitted(messages, tools, text)
        if omitted is not None:
            raise data_error(
                "FT426",
                f"the chat template leaves out {omitted}, which would be lost silently",
                row.origin,
                "use a template that shows it (data.chat_template), or remove it from the row",
            )
        return text

    def conversation(self, messages: Sequence[Message], row: Row, tools: Tools | None = None) -> Rendered:
        """The whole conversation with the assistant's turns marked.

        A turn is what the template adds between the prompt for it (with the generation prompt) and the text that
        includes it. Raises FtcliError FT423 when the template rewrites earlier turns, so that no such text exists.
        """
        full = self.text(messages, row, tools=tools)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or index == 0:
                continue
            before = self.text(messages[:index], row, generation_prompt=True, tools=tools)
            after = self.text(messages[: index + 1], row, tools=tools) if index + 1 < len(messages) else full
            if not after.startswith(before) or not full.startswith(after):
                raise data_error(
                    "FT423",
                    f"the chat template rewrites the conversation before turn {index + 1}, so training would see "
                    "another text than generation does",
                    row.origin,
                    help="split the conversation into single turns, or use a prefix-preserving template such as "
                    "data.chat_template: chatml",
                )
            spans.append((len(before), len(after)))
        return Rendered(full, tuple(spans))

    def plain(self, example: Example) -> Rendered:
        """Plain text between the tokens that the tokenizer's model expects around it; trained is all of it."""
        text = f"{self._head(str(example.text))}{example.text}{self._tokenizer.eos_token or ''}"
        return Rendered(text, ((0, len(text)),))

    def completion(self, example: Example) -> Rendered:
        """A plain prompt with its completion, of which the completion is trained."""
        text = self.plain(example).text
        start = len(self._head(str(example.text))) + len(example.prompt_text or "")
        return Rendered(text, ((start, len(text)),))

    def prompt(self, prompt: Prompt) -> str:
        """The prompt as the model sees it, up to where its answer begins."""
        if prompt.messages is not None:
            return self.text(prompt.messages, prompt.row, generation_prompt=True, tools=prompt.tools)
        return f"{self._head(str(prompt.text))}{prompt.text}"

    def _head(self, text: str) -> str:
        return "" if text.startswith(self._bos) else self._bos

    def _apply(self, messages: Sequence[Message], generation_prompt: bool, tools: Tools | None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )

    def _refusal(self, messages: Sequence[Message], row: Row, error: Exception) -> FtcliError:
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            if not self._knows(role):
                return data_error(
                    "FT425", f"the chat template has no role {role!r}: {error}", row.origin, _role_help(role)
                )
        own = isinstance(error, TemplateError)
        return data_error(
            "FT422",
            f"the chat template refuses this conversation: {error}",
            row.origin,
            help="user and assistant must alternate, starting with the user"
            if own
            else "the template expects something else than the row holds, such as arguments of a call as text",
        )

    def _knows(self, role: str) -> bool:
        """Whether the template renders a message of ``role`` anywhere in the shortest conversation that has one."""
        if role not in self._knows_role:
            message = {"role": role, "content": _PROBE, "name": _PROBE, "tool_call_id": _PROBE}
            user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
            self._knows_role[role] = any(
                self._renders(chat)
                for chat in ([message], [message, user], [user, message], [user, assistant, message], [user, message])
            )
        return self._knows_role[role]

    def _renders(self, chat: list[Message]) -> bool:
        try:
            return _PROBE in self._apply(chat, False, None)
        except (TemplateError, TypeError, ValueError):
            return False


def _bos_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning-of-sequence token, where the tokenizer puts one before plain text by itself."""
    ids = tokenizer("a")["input_ids"]
    return str(tokenizer.bos_token) if ids and ids[0] == tokenizer.bos_token_id else ""


def _omitted(messages: Sequence[Message], tools: Tools | None, text: str) -> str | None:
    """What of a conversation does not stand in its text, compared without white space; None when all does."""
    squeezed: str | None = None
    for number, message in enumerate(messages, 1):
        calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
        wanted = [(str(message.get("content") or ""), f"the text of turn {number} ({message['role']})")]
        wanted += [(name, f"the call of {name} in turn {number}") for name in calls]
        for part, name in wanted:
            if part in text:
                continue
            squeezed = squeezed if squeezed is not None else "".join(text.split())
            if "".join(part.split()) not in squeezed:
                return name
    missing = [tool["function"]["name"] for tool in tools or () if tool["function"]["name"] not in text]
    return f"the tool {missing[0]}" if missing else None


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


def _role_help(role: str) -> str:
    if role == "system":
        return (
            "move that text into the first user message; for Gemma, data.chat_template: gemma-system does so, "
            "in training, evaluation and export alike"
        )
    return "use a template that has it (data.chat_template), or rename the role in the data"
