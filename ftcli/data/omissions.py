"""Finds the parts of a conversation that a chat template leaves out, by rendering it with and without each.

Searching the text for a part is not enough: templates write tool results as JSON, and a word that a template leaves out
may occur elsewhere by chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias

from ftcli.plain import JsonObject
from ftcli.rows.layouts.messages import REASONING_KEYS
from ftcli.rows.limits import REFUSALS
from ftcli.rows.row import IMAGE, Message

#: Functions that a chat may call, as JSON schemas.
Tools: TypeAlias = Sequence[JsonObject]
#: ``(messages, tools, generation prompt)`` to text; raises one of :data:`ftcli.rows.limits.REFUSALS`.
Apply = Callable[[Sequence[Message], "Tools | None", bool], str]
Edit = Callable[["MessagePart", str], str]
Kind = Literal["text", "reasoning", "call", "arguments", "tool"]

#: Shapes of conversations that are remembered; conversations of agents have very many.
_MOST_SHAPES = 2000
#: Messages whose parts are remembered.
_MOST_KNOWN = 4096
#: Text that no conversation holds.
PROBE = "ftcli-probe"
#: Reasoning that is written into the content: an opening tag that may be missing, the reasoning, the closing tag.
_INLINE = re.compile(r"(\s*(?:<think>)?\s*)(.*?)(\s*</think>\s*)(.*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """One thing that a template must show. ``turn`` counts messages from 0; None for a tool."""

    turn: int | None
    kind: Kind
    number: int
    name: str


def split_reasoning(content: str) -> tuple[str, str, str, str]:
    """Content as opening tag, reasoning, closing tag (each with the white space around it) and the rest."""
    found = _INLINE.match(content) if "</think>" in content else None
    return (found[1], found[2], found[3], found[4]) if found else ("", "", "", content)


def reasoning_of(message: Message) -> str:
    """The reasoning of an assistant's turn, from its own key or from the content; empty where there is none."""
    keyed = next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")
    return keyed or split_reasoning(str(message.get("content") or ""))[1]


#: The parts of a message or of tools, with the words of each.
Parts: TypeAlias = list[tuple[MessagePart, str]]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A message that was looked at: its parts, and its share of a conversation's shape."""

    message: Message
    parts: Parts
    shape: tuple[Any, ...]


def _collecting(parts: Parts) -> Edit:
    """Keeps all parts as they are, and adds them to ``parts``."""

    def edit(part: MessagePart, value: str) -> str:
        parts.append((part, value))
        return value

    return edit


class Presence:
    """Says which parts of a conversation a template does not show.

    What a template shows depends on the shape of a conversation far more than on its words, so each shape is looked
    at once, with every part replaced by a probe. A part that is missing there, or whose words are not found in the
    real text, is decided by rendering the conversation with that part changed.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._shapes: dict[object, frozenset[MessagePart]] = {}
        self._open: dict[object, bool] = {}
        self._known: dict[tuple[int, int], _Shown] = {}  # by the turn and the identity of the message

    def lost(
        self,
        messages: Sequence[Message],
        tools: Tools | None,
        text: str,
        wanted: Callable[[MessagePart], bool],
        *,
        generation_prompt: bool = False,
    ) -> Iterator[MessagePart]:
        """The ``wanted`` parts that have no part in ``text``, which the template made of this conversation.

        Each is found when it is asked for: a part that a template shows otherwise is decided by rendering.
        """
        known = [self._parts_of(turn, message) for turn, message in enumerate(messages)]
        named: Parts = []
        for number, tool in enumerate(tools or ()):
            _tool(number, tool, _collecting(named))
        shape = (tuple([one.shape for one in known]), len(named), generation_prompt)
        parts = [*(part for one in known for part in one.parts), *named]
        hidden = self._hidden(messages, tools, shape, parts)
        squeezed = _Squeezed(text)
        return (
            part
            for part, value in parts
            if wanted(part)
            and ((hidden and _key(part) in hidden) or not _stands_in(part, value, text, squeezed))
            and not self._matters(messages, tools, generation_prompt, text, part)
        )

    def shown(self, messages: Sequence[Message], counts: Collection[int]) -> bool:
        """True if no probe is hidden in the beginnings of ``counts`` messages of conversations of this shape."""
        key = (tuple([(m["role"], *m, not m["content"] or m["content"].isspace()) for m in messages]), *counts)
        if key not in self._open:
            if len(self._open) >= _MOST_SHAPES:
                self._open.clear()
            known = [self._parts_of(turn, message) for turn, message in enumerate(messages)]
            self._open[key] = not any(
                self._hidden(
                    messages[:count],
                    None,
                    (tuple([one.shape for one in known[:count]]), 0, False),
                    [part for one in known[:count] for part in one.parts],
                )
                for count in counts
            )
        return self._open[key]

    def _parts_of(self, turn: int, message: Message) -> _Shown:
        found = self._known.get((turn, id(message)))
        if found is None or found.message is not message:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            parts: Parts = []
            _message(turn, message, _collecting(parts))
            kinds = tuple([(part.kind, part.number) for part, _ in parts])
            found = self._known[turn, id(message)] = _Shown(message, parts, (message["role"], *sorted(message), kinds))
        return found

    def _hidden(
        self, messages: Sequence[Message], tools: Tools | None, shape: tuple[Any, ...], parts: Parts
    ) -> frozenset[MessagePart]:
        """Parts whose probes a conversation of this shape does not show; all of them where it cannot be rendered."""
        if shape not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            keys = [_key(part) for part, _ in parts]
            probes = {key: f"{PROBE}-{number}-end" for number, key in enumerate(keys)}
            probed = _rebuilt(messages, tools, lambda part, _: probes[_key(part)])
            try:
                text = self._apply(*probed, shape[-1])
            except REFUSALS:
                text = ""
            self._shapes[shape] = frozenset(key for key, probe in probes.items() if probe not in text)
        return self._shapes[shape]

    def _matters(
        self, messages: Sequence[Message], tools: Tools | None, generation_prompt: bool, text: str, part: MessagePart
    ) -> bool:
        """True if the text changes with each half of the part."""
        for change in (_first_half, _second_half):
            changed = _rebuilt(messages, tools, partial(_changed, part, change))
            try:
                if self._apply(*changed, generation_prompt) == text:
                    return False
            except REFUSALS:
                continue  # the template looked at it
        return True


def _changed(wanted: MessagePart, change: Callable[[str], str], part: MessagePart, value: str) -> str:
    return change(value) if part == wanted else value


def _first_half(value: str) -> str:
    return PROBE + value[(len(value) + 1) // 2 :]


def _second_half(value: str) -> str:
    return value[: len(value) // 2] + PROBE


def _key(part: MessagePart) -> MessagePart:
    """The part without the words of this very conversation."""
    return MessagePart(part.turn, part.kind, part.number, "")


class _Squeezed:
    """A text without its white space, made where somebody asks for it."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._made: str | None = None

    def __call__(self) -> str:
        if self._made is None:
            self._made = "".join(self._text.split())
        return self._made


def _stands_in(part: MessagePart, value: str, text: str, squeezed: _Squeezed) -> bool:
    """True if the words of a part are in the text, as they are, as JSON, or with other white space."""
    if IMAGE in value:
        return all(_stands_in(part, piece, text, squeezed) for piece in value.split(IMAGE))
    if part.kind == "arguments" or value in text:
        return True
    if any(json.dumps(value, ensure_ascii=ascii)[1:-1] in text for ascii in (True, False)):
        return True
    return "".join(value.split()) in squeezed()


def _rebuilt(messages: Sequence[Message], tools: Tools | None, edit: Edit) -> tuple[list[Message], list[Any] | None]:
    """The conversation with each part as ``edit`` wants it."""
    shown = [_message(turn, message, edit) for turn, message in enumerate(messages)]
    return shown, [_tool(number, tool, edit) for number, tool in enumerate(tools)] if tools else None


def _message(turn: int, message: Message, edit: Edit) -> Message:
    made = dict(message)
    content, role = str(message.get("content") or ""), message["role"]
    thinks = role == "assistant" and ("</think>" in content or any(message.get(key) for key in REASONING_KEYS))
    if not thinks and not message.get("tool_calls"):
        if content.strip():
            made["content"] = edit(_text_part(turn, role), content)
        return made
    named = f"turn {turn + 1}"
    opening, reasoning, closing, rest = ("", "", "", content)
    if role == "assistant":
        opening, reasoning, closing, rest = split_reasoning(content)
        keyed = next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")
        if keyed.strip():
            thought = edit(MessagePart(turn, "reasoning", 0, f"the reasoning of {named}"), keyed.strip())
            made.update({key: thought for key in REASONING_KEYS if message.get(key)})
    if reasoning.strip():
        reasoning = edit(MessagePart(turn, "reasoning", 1, f"the reasoning of {named}"), reasoning)
    if rest.strip():
        rest = edit(_text_part(turn, role), rest)
    if content:
        made["content"] = f"{opening}{reasoning}{closing}{rest}"
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(turn, number, call, edit) for number, call in enumerate(message["tool_calls"])]
    return made


@lru_cache(1024)
def _text_part(turn: int, role: str) -> MessagePart:
    return MessagePart(turn, "text", 0, f"the text of turn {turn + 1} ({role})")


def _call(turn: int, number: int, call: JsonObject, edit: Edit) -> JsonObject:
    function = dict(call["function"])
    named = f"the call of {function['name']} in turn {turn + 1}"
    if function.get("arguments"):
        before = json.dumps(function["arguments"])
        after = edit(MessagePart(turn, "arguments", number, f"the arguments of {named}"), before)
        if after != before:
            function["arguments"] = {after: after}
    function["name"] = edit(MessagePart(turn, "call", number, named), function["name"])
    return {**call, "function": function}


def _tool(number: int, tool: JsonObject, edit: Edit) -> JsonObject:
    function = tool["function"]
    name = edit(MessagePart(None, "tool", number, f"the tool {function['name']}"), function["name"])
    return {**tool, "function": {**function, "name": name}}
