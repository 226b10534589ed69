"""Renders conversations by the tokenizer's chat template and finds the assistant's characters in the result.

One rendering serves training, evaluation, GRPO and export: :class:`Renderer`. Findings say where the template refuses a
row, or leaves something of it out.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from jinja2.exceptions import TemplateError

from ftcli.assets import template_path
from ftcli.config.data import DataConfig
from ftcli.data.answers import Rendered
from ftcli.data.chat_prefixes import Prefixes, PrefixRenderer
from ftcli.data.omissions import PROBE, MessagePart, Presence, Tools, reasoning_of, split_reasoning
from ftcli.errors import ExitCode, FtcliError, Origin, first_line
from ftcli.facts.tokenizer import no_template_finding
from ftcli.rows.layouts.messages import REASONING_KEYS
from ftcli.rows.limits import REFUSALS, Allowance, TemplateStopped
from ftcli.rows.prompts import Prompt
from ftcli.rows.row import IMAGE, Example, Message, Row, Switches, data_error, surrogate
from ftcli.tables import code_of, training_forms

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Renderers that are kept for rows with switches of their own; they may differ from row to row.
_MOST_SWITCHED = 64
#: Characters of all texts that are written ahead of their use.
_MOST_AHEAD = 2**20


def renderer_of(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> Renderer:
    """The renderer of prompts, for training and generation, by the recipe. Raises FtcliError FT424."""
    return Renderer(tokenizer, data.chat_template, reasoning=data.reasoning, switches=data.chat_template_kwargs)


class Renderer:
    """A tokenizer's chat template, checked.

    Args:
        tokenizer: Its own template is used unless ``template`` names another.
        template: A ``.jinja`` file or the name of one in ftcli's assets.
        reasoning: What becomes of an assistant's reasoning: ``data.reasoning``.
        switches: Values of the template's own switches: ``data.chat_template_kwargs``.

    Raises FtcliError FT424 when ``template`` cannot be read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str | None = None,
        *,
        reasoning: str = "keep",
        switches: Switches | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = read_template(template) if template is not None else None
        self._reasoning = reasoning
        self._switches = dict(switches or {})
        self._knows_role: dict[str, bool] = {}
        self._of_parts: bool | None = None  # whether the template takes contents as lists of parts only
        self._allowance = Allowance()
        self._bos = _bos_of(tokenizer)
        self._presence = Presence(self.apply)
        # By the identity of messages, which are held for as long: hashing what they say would take longer.
        self._ahead: dict[tuple[int, ...], str] = {}
        self._prepared: dict[int, tuple[Message, Message]] = {}
        self._switched: dict[str, Renderer] = {}
        self._prefixes: PrefixRenderer | None = None
        self._told: dict[tuple[int, ...], Prefixes] = {}
        #: What becomes of a rendered text before it is tokenized, where images have more to say there.
        self.written: Callable[[str], str] = str

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

    def use(self, template: str) -> None:
        """Renders with the text of another template from now on: the training form of its own."""
        self._template = template
        self._switched.clear()
        self._prefixes = None

    def switched(self, switches: Switches, row: Row) -> Renderer:
        """This renderer with a row's own values for the template's switches.

        Raises FtcliError FT426 for a switch that the template never asks for.
        """
        if not switches:
            return self
        key = json.dumps(dict(switches), sort_keys=True)
        if key not in self._switched:
            unread = sorted(set(switches) - set(re.findall(r"\w+", self.source or " ".join(switches))))
            if unread:
                message = f"the chat template does not read {unread[0]!r} of the row's chat_template_kwargs"
                help = "remove it from the row, or use a template that reads it (data.chat_template)"
                raise data_error("FT426", message, row.origin, help)
            if len(self._switched) >= _MOST_SWITCHED:
                self._switched.clear()
            given = {**self._switches, **switches}
            made = Renderer(self._tokenizer, reasoning=self._reasoning, switches=given)
            made._template, made._allowance, made.written = self._template, self._allowance, self.written
            self._switched[key] = made
        return self._switched[key]

    def render(
        self, messages: Sequence[Message], row: Row, *, generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """``messages`` as the template writes them, whatever it leaves out.

        Raises FtcliError: FT421 no template, FT422 with the template's own words, FT425 for a role that it lacks.
        """
        if not self._template and not self._tokenizer.chat_template:
            raise FtcliError([no_template_finding(row.origin)], ExitCode.DATA)
        try:
            return self.apply(messages, tools, generation_prompt)
        except REFUSALS as error:
            raise self._refusal(messages, row, error) from error

    def text(
        self, messages: Sequence[Message], row: Row, *, generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """``messages`` as the model sees them, with everything that they hold.

        Earlier answers may be written differently than last ones, as generation sees them; without a generation prompt
        even these must show their reasoning. Raises FtcliError as :meth:`render`, FT426 when a turn, a call, its
        arguments or a tool is left out, FT427 for reasoning that the recipe refuses.
        """
        chat = self.prepared(messages, row)
        text = self.render(chat, row, generation_prompt=generation_prompt, tools=tools)
        self.require(chat, row, tools, text, generation_prompt=generation_prompt, reasoning=not generation_prompt)
        return text

    def prepared(self, messages: Sequence[Message], row: Row) -> list[Message]:
        """The messages with their reasoning kept, under every key that templates read it from, or dropped.

        Raises FtcliError FT427 for reasoning under ``data.reasoning: refuse``.
        """
        made = []
        for number, message in enumerate(messages, 1):
            thoughtful = _thoughtful(message)
            if thoughtful and self._reasoning == "refuse":
                what = f"turn {number} holds reasoning, which data.reasoning: refuse does not allow"
                help = "remove it from the row, or choose data.reasoning: keep or drop"
                raise data_error("FT427", what, row.origin, help)
            made.append(self._thinking(message) if thoughtful else message)
        return made

    def _thinking(self, message: Message) -> Message:
        made, found = self._prepared.get(id(message), (None, message))
        return found if made is message else _thinking(message, keep=self._reasoning == "keep")

    @contextlib.contextmanager
    def writing_ahead(self, chats: Sequence[tuple[Sequence[Message], Callable[[], Sequence[int]]]]) -> Iterator[None]:
        """A block in which conversations without tools are rendered already: many at a time, which is far cheaper.

        What the template refuses together is rendered one by one when it is asked for, as outside of the block.

        Args:
            chats: Conversations, each with what tells the assistant's turns of which the prompts are asked for.
        """
        wanted: dict[bool, list[list[Message]]] = {True: [], False: []}
        asked: list[tuple[list[Message], Callable[[], Sequence[int]]]] = []
        for messages, turns in chats:
            if all(map(_is_plain, messages)):
                chat = list(messages)
            elif any(message.get("tool_calls") for message in messages):
                continue
            else:
                held = [(m, _thinking(m, keep=self._reasoning == "keep") if _thoughtful(m) else m) for m in messages]
                self._prepared.update({id(message): (message, made) for message, made in held if made is not message})
                chat = [made for _, made in held]
            asked.append((chat, turns))
        try:
            written = self._prefixes_of([chat for chat, _ in asked])
            for (chat, turns), found in zip(asked, written, strict=True):
                if found is not None:
                    self._told[_identity(chat, False)] = found
                else:
                    prompted = turns()
                    counts = [(turn, True) for turn in prompted]
                    counts += [(turn + 1, False) for turn in (*prompted, len(chat) - 1)]
                    for count, generation_prompt in dict.fromkeys(counts):
                        wanted[generation_prompt].append(chat[:count])
            for generation_prompt, some in wanted.items():
                self._write_ahead(some, generation_prompt)
            yield
        finally:
            self._ahead.clear()
            self._told.clear()
            self._prepared.clear()

    def _prefixes_of(self, chats: list[list[Message]]) -> list[Prefixes | None]:
        """Of each conversation, where one rendering of it tells what all its prefixes are."""
        source, size = self.source, sum(map(_size, chats))
        self._shown([])  # asks the template for its form of contents
        if not chats or source is None or self._of_parts or self.written is not str or size > _MOST_AHEAD:
            return [None] * len(chats)
        if self._prefixes is None:
            self._prefixes = PrefixRenderer(self._tokenizer, source, self._switches)
        prefixes = self._prefixes.prefixes

        def render(messages: Sequence[Message], generation_prompt: bool) -> str:
            return self._written(list(messages), None, generation_prompt)[0]

        try:
            return self._allowance.run(size, lambda: [prefixes(c, render) for c in chats], len(chats))
        except REFUSALS:
            return [None] * len(chats)

    def _write_ahead(self, chats: list[list[Message]], generation_prompt: bool) -> None:
        size = sum(map(_size, chats))
        if not chats or size > _MOST_AHEAD:
            return
        try:
            shown = [self._shown(chat) for chat in chats]
            texts = self._allowance.run(size, lambda: self._written(shown, None, generation_prompt), len(chats))
        except REFUSALS:
            half = len(chats) // 2
            if half > 1:
                self._write_ahead(chats[:half], generation_prompt)
                self._write_ahead(chats[half:], generation_prompt)
        else:
            self._ahead.update({_identity(c, generation_prompt): t for c, t in zip(chats, texts, strict=True)})

    def told(self, messages: Sequence[Message], turns: Sequence[int]) -> Prefixes | None:
        """What one rendering tells of a conversation, if it is known and shows all that is said in it, in its place.

        Args:
            turns: Those of which the prefixes that end with them show all that they say.
        """
        found = self._told.get(_identity(messages, False)) if self._told else None
        if found is None or not all(map(_is_plain, messages)):
            return None
        ends = zip(found.places, found.places[1:], strict=False)
        texts = [(str(message["content"]), place) for message, place in zip(messages, ends, strict=True)]
        if not all(found.text.find(text, *place) >= 0 or not text.strip() for text, place in texts):
            return None
        counts = {len(messages), *(turn + 1 for turn in turns)}
        return found if self._presence.shown(messages, counts) else None

    def lost(self, messages: Sequence[Message], tools: Tools | None, text: str, turn: int) -> list[MessagePart]:
        """Parts of one turn that are missing in ``text``, a conversation rendered without a generation prompt."""
        return list(self._presence.lost(messages, tools, text, lambda part: part.turn == turn))

    def require(
        self,
        messages: Sequence[Message],
        row: Row,
        tools: Tools | None,
        text: str,
        *,
        generation_prompt: bool = False,
        reasoning: bool = False,
        checked: Collection[int] = (),
    ) -> None:
        """Raises FtcliError FT426 when ``text``, the rendering of ``messages``, does not show all of them.

        What an assistant said before may be missing, if the template shows it as long as it is the last turn.

        Args:
            reasoning: Require the reasoning of earlier answers, too.
            checked: Turns that are looked at elsewhere.
        """

        def earlier(part: MessagePart) -> bool:
            return part.turn is not None and messages[part.turn]["role"] == "assistant"

        def wanted(part: MessagePart) -> bool:
            return part.turn not in checked and (reasoning or part.kind != "reasoning" or not earlier(part))

        for part in self._presence.lost(messages, tools, text, wanted, generation_prompt=generation_prompt):
            said = earlier(part) and part.kind != "reasoning"
            if not (said and part.turn is not None and self._shows(messages[: part.turn + 1], tools, part)):
                raise left_out(part, row)

    def _shows(self, messages: Sequence[Message], tools: Tools | None, part: MessagePart) -> bool:
        try:
            text = self.apply(messages, tools, False)
        except REFUSALS:
            return False
        return next(self._presence.lost(messages, tools, text, lambda other: other == part), None) is None

    def plain(self, example: Example) -> Rendered:
        """Plain text between the tokens that the tokenizer's model expects around it; trained is all of it."""
        eos = self._tokenizer.eos_token or ""
        end = "" if eos and str(example.text).endswith(eos) else eos
        text = f"{self._head(str(example.text))}{example.text}{end}"
        return Rendered(text, ((0, len(text)),))

    def completion(self, example: Example) -> Rendered:
        """A plain prompt with its completion, of which the completion is trained."""
        text = self.plain(example).text
        start = len(self._head(str(example.text))) + len(example.prompt_text or "")
        return Rendered(text, ((start, len(text)),), answers=True)

    def prompt(self, prompt: Prompt) -> str:
        """The prompt as the model sees it, up to where its answer begins.

        Raises FtcliError as :meth:`text` and :meth:`switched`, FT412 for text that no tokenizer can read.
        """
        if prompt.messages is not None:
            renderer = self.switched(prompt.switches, prompt.row)
            text = renderer.text(prompt.messages, prompt.row, generation_prompt=True, tools=prompt.tools)
        else:
            text = f"{self._head(str(prompt.text))}{prompt.text}"
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise FtcliError([surrogate(error, prompt.row)], ExitCode.DATA) from error
        return text

    def _head(self, text: str) -> str:
        return "" if text.startswith(self._bos) else self._bos

    def apply(self, messages: Sequence[Message], tools: Tools | None, generation_prompt: bool) -> str:
        """The template's text. Raises one of :data:`ftcli.rows.limits.REFUSALS`.

        A template that took too much time or memory once is not run again.
        """
        ahead = self._ahead.get(_identity(messages, generation_prompt)) if self._ahead and not tools else None
        if ahead is not None:
            return ahead
        try:
            return self._apply(messages, tools, generation_prompt)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # Some templates (DeepSeek's) join the arguments of a call to other text: they want them as JSON.
            return self._apply([_with_text_arguments(message) for message in messages], tools, generation_prompt)

    def _apply(self, messages: Sequence[Message], tools: Tools | None, generation_prompt: bool) -> str:
        shown = self._shown(messages)
        return self._allowance.run(_size(messages), lambda: self._written(shown, tools, generation_prompt)[0])

    def _shown(self, messages: Sequence[Message]) -> list[Message]:
        if self._of_parts is None:
            self._of_parts = False  # while it is asked
            self._of_parts = self._takes_parts_only()
        return [_in_parts(m) if self._of_parts or IMAGE in str(m.get("content")) else m for m in messages]

    def _written(
        self, shown: list[Message] | list[list[Message]], tools: Tools | None, generation_prompt: bool
    ) -> list[str]:
        """The texts of one conversation or several."""
        texts = self._tokenizer.apply_chat_template(
            shown,
            tools=list(tools) if tools else None,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **self._switches,
        )
        return [self.written(text) for text in ([texts] if isinstance(texts, str) else map(str, texts))]

    def _refusal(self, messages: Sequence[Message], row: Row, error: Exception) -> FtcliError:
        if isinstance(error, TemplateStopped):
            return stopped(row, error)
        roles = dict.fromkeys(str(message["role"]) for message in messages)
        # A refusal that is not the template's own, or by one that does not render a user's either, is about no role.
        for role in roles if isinstance(error, TemplateError) and self._knows("user") else ():
            if not self._knows(role):
                return unknown_role(row, role, error)
        return refused(row, error)

    def _knows(self, role: str) -> bool:
        """True if the template renders a message of ``role`` somewhere in the shortest conversation that has one."""
        if role not in self._knows_role:
            message = {"role": role, "content": PROBE, "name": PROBE, "tool_call_id": PROBE}
            user, assistant = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
            call = {"type": "function", "function": {"name": PROBE, "arguments": {"a": "b"}}}
            caller = {"role": "assistant", "content": "", "tool_calls": [call]}
            self._knows_role[role] = any(
                self._renders(chat)
                for chat in ([message], [message, user], [user, message], [user, assistant, message])
            ) or (role == "tool" and self._renders([user, caller, {**message, "content": f"{PROBE}-shown"}], "-shown"))
        return self._knows_role[role]

    def _takes_parts_only(self) -> bool:
        question: Message = {"role": "user", "content": PROBE}
        if self._renders([question]) or not self._renders([_in_parts(question)]):
            return False
        return "type" not in self.apply([_in_parts(question)], None, False)  # else it wrote the list itself

    def _renders(self, chat: list[Message], text: str = PROBE) -> bool:
        try:
            return text in self.apply(chat, None, False)
        except REFUSALS:
            return False


def _bos_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning-of-sequence token, where the tokenizer puts one before plain text by itself."""
    ids = tokenizer("a")["input_ids"]
    return str(tokenizer.bos_token) if ids and ids[0] == tokenizer.bos_token_id else ""


def _identity(messages: Sequence[Message], generation_prompt: bool) -> tuple[int, ...]:
    return (generation_prompt, *map(id, messages))


def _size(messages: Sequence[Message]) -> int:
    return sum(len(str(message.get("content") or "")) for message in messages)


def _is_plain(message: Message) -> bool:
    """True for a message of text alone."""
    return len(message) == 2 and "</think>" not in str(message.get("content", "</think>"))


def _thoughtful(message: Message) -> bool:
    return message["role"] == "assistant" and not _is_plain(message) and bool(reasoning_of(message).strip())


def _thinking(message: Message, *, keep: bool) -> Message:
    """An assistant's message with its reasoning under every key, where it has one of them, or without any."""
    keyed = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
    if keep:
        return message if keyed is None else {**message, **dict.fromkeys(REASONING_KEYS, keyed)}
    made = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    return {**made, "content": split_reasoning(str(message.get("content") or ""))[3]}


def _in_parts(message: Message) -> Message:
    """The message as templates of models for images want it."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    parts = [[{"type": "image"}, {"type": "text", "text": text}] for text in content.split(IMAGE)]
    flat = [part for pair in parts for part in pair][1:]  # one image less than texts
    return {**message, "content": [part for part in flat if part.get("text") != ""] or flat}


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(c["function"]["arguments"], ensure_ascii=False)}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def read_template(name: str) -> str:
    """Text of a template file, or of the bundled template of that name. Raises FtcliError FT424."""
    path = template_path(name)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        message = f"data.chat_template: {path} cannot be read: {error}"
        help = "name a readable .jinja file, or a bundled template"
        raise FtcliError.single("FT424", message, exit_code=ExitCode.RECIPE, origin=Origin(name), help=help) from error


def stopped(row: Row, error: Exception) -> FtcliError:
    """FT422: the template took more time or memory than it may."""
    help = "use another template (data.chat_template); if only one row is that large, remove it"
    return data_error("FT422", f"the chat template was stopped: {first_line(error)}", row.origin, help)


def unknown_role(row: Row, role: str, error: Exception) -> FtcliError:
    """FT425: the template refuses the row, and renders no message of ``role``."""
    message = f"the chat template has no role {role!r}: {first_line(error)}"
    help = "use a template that has it (data.chat_template), or rename the role in the data"
    if role == "system":
        help = "move that text into the first user message; for Gemma, data.chat_template: gemma-system does so, "
        help += "in training, evaluation and export alike"
    return data_error("FT425", message, row.origin, help)


def refused(row: Row, error: Exception) -> FtcliError:
    """FT422: the template, or Python while it rendered, raised ``error``."""
    return data_error(
        "FT422",
        f"the chat template refuses this conversation: {_said(error)}",
        row.origin,
        help="user and assistant must alternate, starting with the user"
        if isinstance(error, TemplateError)
        else "the template expects something other than the row holds, such as arguments of a call as text",
    )


def left_out(part: MessagePart, row: Row) -> FtcliError:
    """FT426: the template does not show a part of the row."""
    return data_error(
        "FT426",
        f"the chat template leaves out {part.name}, which would be lost silently",
        row.origin,
        "remove it from the row (data.reasoning: drop does so), or use a template that shows it (data.chat_template)"
        if part.kind == "reasoning"
        else "use a template that shows it (data.chat_template), or remove it from the row",
    )


def _said(error: Exception) -> str:
    """A template's own words of refusal; for other errors Python's text with their kind."""
    said = first_line(error)[:500]
    return said if isinstance(error, TemplateError) else f"{type(error).__name__}: {said}"


def training_form(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The training form of ``template``, from the first collection that knows it; None when none does."""
    found = (code_of(row.code)(tokenizer, template) for row in training_forms.rows())
    return next((form for form in found if form is not None), None)


def of_trl(tokenizer: PreTrainedTokenizerBase, template: str) -> str | None:
    """The form that the installed TRL has for this very template."""
    from trl.chat_template_utils import get_training_chat_template

    stand_in = copy.copy(tokenizer)
    stand_in.chat_template = template
    try:
        form: str | None = get_training_chat_template(stand_in)
    except ValueError:  # a template that TRL does not know
        return None
    return form
