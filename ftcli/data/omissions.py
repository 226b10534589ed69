"""Finds the parts of a conversation that a chat template leaves out, by rendering it with and without each.

Searching the text for a part is not enough: templates write tool results as JSON, and a word that a template leaves out
may occur elsewhere by chance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
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


class Presence:
    """Says which parts of a conversation a template does not show.

    What a template shows depends on the shape of a conversation far more than on its words, so each shape is looked
    at once, with every part replaced by a probe. A part that is missing there, or whose words are not found in the
    real text, is decided by rendering the conversation with that part changed.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._shapes: dict[object, frozenset[MessagePart]] = {}

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
        words: dict[MessagePart, str] = {}
        _rebuilt(messages, tools, lambda part, value: words.setdefault(part, value))
        hidden = self._hidden(messages, tools, generation_prompt, words)
        squeezed = cache(lambda: "".join(text.split()))
        return (
            part
            for part, value in words.items()
            if wanted(part)
            and (_key(part) in hidden or not _stands_in(part, value, text, squeezed))
            and not self._matters(messages, tools, generation_prompt, text, part)
        )

    def _hidden(
        self, messages: Sequence[Message], tools: Tools | None, generation_prompt: bool, words: dict[MessagePart, str]
    ) -> frozenset[MessagePart]:
        """Parts whose probes a conversation of this shape does not show; all of them where it cannot be rendered."""
        keys = [_key(part) for part in words]
        shape = (tuple((m["role"], *sorted(m)) for m in messages), tuple(keys), generation_prompt)
        if shape not in self._shapes:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            probes = {key: f"{PROBE}-{number}-end" for number, key in enumerate(keys)}
            probed = _rebuilt(messages, tools, lambda part, _: probes[_key(part)])
            try:
                text = self._apply(*probed, generation_prompt)
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


def _stands_in(part: MessagePart, value: str, text: str, squeezed: Callable[[], str]) -> bool:
    """True if the words of a part are in the text, as they are, as JSON, or with other white space.

    Args:
        squeezed: The text without any.
    """
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
    content, named = str(message.get("content") or ""), f"turn {turn + 1}"
    opening, reasoning, closing, rest = ("", "", "", content)
    if message["role"] == "assistant":
        opening, reasoning, closing, rest = split_reasoning(content)
        keyed = next((str(message[key]) for key in REASONING_KEYS if message.get(key)), "")
        if keyed.strip():
            thought = edit(MessagePart(turn, "reasoning", 0, f"the reasoning of {named}"), keyed.strip())
            made.update({key: thought for key in REASONING_KEYS if message.get(key)})
    if reasoning.strip():
        reasoning = edit(MessagePart(turn, "reasoning", 1, f"the reasoning of {named}"), reasoning)
    if rest.strip():
        rest = edit(MessagePart(turn, "text", 0, f"the text of {named} ({message['role']})"), rest)
    if content:
        made["content"] = f"{opening}{reasoning}{closing}{rest}"
    if message.get("tool_calls"):
        made["tool_calls"] = [_call(turn, number, call, edit) for number, call in enumerate(message["tool_calls"])]
    return made


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
