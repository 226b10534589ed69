"""Conversations: messages with roles, calls and tools, as rows and other layouts hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftcli.config.data import ARGUMENTS_OF_RENDERING
from ftcli.plain import JsonObject
from ftcli.rows.jsontext import parse
from ftcli.rows.layouts.marks import marks_of
from ftcli.rows.row import Example, Message, Misfit, Ranges, Row, Switches

#: Keys of a message that hold an assistant's reasoning.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
#: Kinds of parts of a content that are reasoning, and would be taken for the answer.
_THOUGHTS = ("thinking", "reasoning")
#: What templates may show of a message beside its text and calls. Other keys (ids, sources, dates) are not rendered.
_SHOWN = ("role", "name", "tool_call_id", *REASONING_KEYS)
#: Columns of a row, and keys of a message, that hold something other than text.
_MEDIA = ("image", "images", "audio", "video", "videos")
#: Keys of a message that are refused, because training without them would be training on something else.
_UNSUPPORTED = ("function_call", *_MEDIA)


def understand(row: Row) -> Example:
    """``{"messages": [{"role": "user", "content": ...}, ...], "tools": ...}``."""
    turns = list_of(row.fields["messages"])
    messages = messages_of(turns)
    return conversation(row, messages, untrained=marks_of(turns, [message["role"] for message in messages]))


def conversation(
    row: Row,
    messages: Sequence[Message],
    completion_from: int | None = None,
    untrained: Mapping[int, Ranges | None] | None = None,
) -> Example:
    """The row as a chat of ``messages``, with the functions and the template's switches of its other columns.

    Args:
        completion_from: The message with which the completion begins; None: the last one.
        untrained: Messages that bear no loss, and ranges in them (:func:`ftcli.rows.layouts.marks.marks_of`).

    Raises Misfit without an assistant's turn, or when the row holds images, audio or video beside them.
    """
    media = next((key for key in _MEDIA if row.fields.get(key)), None)
    if media is not None:
        raise Misfit(f"the row has {media!r}, which is not supported: only text is trained")
    if not any(message["role"] == "assistant" for message in messages):
        raise Misfit("the conversation has no assistant turn, so there is nothing to train on")
    return Example(
        row,
        messages=tuple(messages),
        tools=tools_of(row),
        completion_from=completion_from,
        untrained=untrained or {},
        switches=switches_of(row),
    )


def messages_of(value: Any) -> list[Message]:
    """A list of messages in the form that chat templates take. Raises Misfit."""
    return [_message(item, number) for number, item in enumerate(list_of(value), 1)]


def list_of(value: Any) -> list[Any]:
    """The turns of a conversation: a list that is not empty, or the JSON text of one. Raises Misfit."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # CSV and many Parquet files hold JSON as text
        try:
            value = parse(value)
        except ValueError as error:
            raise Misfit(f"the conversation is text that is not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise Misfit("the conversation must be a list with at least one message")
    return value


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise Misfit(f"message {number} has no 'role'")
    refuse_unsupported(item, number)
    message = {key: item[key] for key in _SHOWN if item.get(key) is not None}
    if item.get("tool_calls"):
        calls = item["tool_calls"]
        if not isinstance(calls, list):
            raise Misfit(f"message {number}: 'tool_calls' must be a list")
        message["tool_calls"] = [call_of(call, number) for call in calls]
    optional = "tool_calls" in message or any(message.get(key) for key in REASONING_KEYS)
    message["content"] = _content(item.get("content"), number, optional=optional)
    return message


def refuse_unsupported(turn: JsonObject, number: int) -> None:
    """Raises Misfit for a turn that says something which training would ignore."""
    found = next((key for key in _UNSUPPORTED if turn.get(key)), None)
    if found is not None:
        raise Misfit(f"message {number} has {found!r}, which is not supported: text and `tool_calls` are")
    if any(turn.get(key) is not None and not isinstance(turn[key], str) for key in REASONING_KEYS):
        raise Misfit(f"message {number} has reasoning that is not text")
    if len({turn[key] for key in REASONING_KEYS if turn.get(key)}) > 1:
        raise Misfit(f"message {number} holds reasoning twice, and the two differ")


def _content(content: Any, number: int, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = [p.get("text") if isinstance(p, dict) and p.get("type") not in _THOUGHTS else None for p in content]
        if not all(isinstance(part, str) for part in parts):
            raise Misfit(f"message {number} holds something other than text, and only text is trained")
        return "".join(map(str, parts))
    if not isinstance(content, str):
        raise Misfit(f"message {number} has no text in 'content'")
    return content


def call_of(call: Any, number: int) -> JsonObject:
    """One call as templates take it: ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit(f"message {number} calls a function without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse(arguments or "{}")
        except ValueError as error:
            raise Misfit(f"message {number}: the arguments of {function['name']} are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Misfit(f"message {number}: the arguments of {function['name']} must be a JSON object")
    kept = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tools_of(row: Row) -> tuple[JsonObject, ...] | None:
    """The tools that a row's chat may call: its column `tools`, or `functions`, the former name. Raises Misfit."""
    found = {name: _tools(row, name) for name in ("tools", "functions")}
    given = {name: tools for name, tools in found.items() if tools is not None}
    if len(given) == 2 and given["tools"] != given["functions"]:
        raise Misfit("the columns 'tools' and 'functions' differ, and only one of them can be shown to the model")
    return next(iter(given.values()), None)


def _tools(row: Row, name: str) -> tuple[JsonObject, ...] | None:
    value = _from_text(row, name)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Misfit(f"column {name!r} must be a list of JSON schemas")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    named = (tool["function"].get("name") if isinstance(tool["function"], dict) else None for tool in tools)
    if not all(isinstance(called, str) and called for called in named):
        raise Misfit(f"column {name!r} holds a function without a name that is text")
    return tuple(tools)


def switches_of(row: Row) -> Switches:
    """A row's own values for switches of the chat template: its column `chat_template_kwargs`. Raises Misfit."""
    value = _from_text(row, "chat_template_kwargs")
    if not value:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, bool | int | float | str) for v in value.values()):
        raise Misfit("column 'chat_template_kwargs' must map names of switches to booleans, numbers or texts")
    taken = sorted(ARGUMENTS_OF_RENDERING & set(value))
    if taken:
        raise Misfit(f"column 'chat_template_kwargs' sets {taken[0]!r}, which is not a template switch")
    return value


def _from_text(row: Row, name: str) -> Any:
    """The column's value, which tables hold as JSON text."""
    value = row.fields.get(name)
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise Misfit(f"column {name!r} is text that is not JSON: {error}") from error
