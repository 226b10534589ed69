"""What a row of each layout means: a conversation, a prompt with its completion, or plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ftcli.config.data import Format
from ftcli.errors import FtcliError
from ftcli.rows.reading import column_names
from ftcli.rows.row import Row, data_error

Layout = Literal["messages", "prompt_completion", "prompt_answer", "alpaca", "sharegpt", "text"]
Message = dict[str, Any]

#: Columns that each layout needs, in the order in which `format: auto` tries them.
LAYOUTS: Mapping[Layout, tuple[str, ...]] = MappingProxyType(
    {
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "prompt_completion": ("prompt", "completion"),
        "prompt_answer": ("prompt", "answer"),
        "alpaca": ("instruction", "output"),
        "text": ("text",),
    }
)

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
#: What templates may show of a message beside its text and calls. Other keys (ids, sources, dates) are not rendered.
_SHOWN = ("role", "name", "tool_call_id", "reasoning_content", "thinking")
#: Keys that say something about training or content that would be lost without a word.
_LOST = ("function_call", "image", "images", "audio", "video", "videos")


@dataclass(frozen=True, slots=True)
class Example:
    """One row, understood. Either ``messages`` (a chat) or ``text``; ``prompt_text`` is its part without loss.

    For plain prompt/completion strings ``text`` is the whole and ``prompt_text`` the leading part of it. ``tools`` are
    the functions that a chat may call, as JSON schemas. ``completion_from`` is the first message of the completion;
    None: the last one.
    """

    row: Row
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    prompt_text: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    completion_from: int | None = None


class Misfit(Exception):
    """A row that does not fit its layout; the message says how."""


def detect_format(row: Row) -> Layout:
    """The layout of a row, by its columns.

    Raises FtcliError FT411 when no layout fits, naming the columns found and those expected.
    """
    layout = next((name for name, required in LAYOUTS.items() if set(required) <= set(row.fields)), None)
    if layout is None:
        raise unknown_layout(row)
    return layout


def unknown_layout(row: Row) -> FtcliError:
    """FT411: the columns found and those expected."""
    expected = "; ".join(f"{layout}: {', '.join(required)}" for layout, required in LAYOUTS.items())
    return data_error(
        "FT411",
        f"the columns {column_names(row.fields)} fit no known layout",
        row.origin,
        help=f"rename columns with `columns`; expected one of {expected}",
    )


def layout_of(row: Row, requested: Format) -> Layout:
    """The layout that the recipe asks for, or finds in ``row`` under `auto`. Raises FtcliError FT411."""
    return detect_format(row) if requested == "auto" else requested


def understand(row: Row, layout: Layout) -> Example:
    """The row as an example. Raises Misfit with the reason when it does not fit ``layout``."""
    missing = [name for name in LAYOUTS[layout] if name not in row.fields]
    if missing:
        raise Misfit(f"column {missing[0]!r} is missing")
    fields = row.fields
    if layout == "text":
        return Example(row, text=_text(fields["text"], "text"))
    if layout == "prompt_completion" and not isinstance(fields["prompt"], list):
        return _plain_pair(row)
    media = next((key for key in _LOST if key in fields and fields[key] and key != "function_call"), None)
    if media is not None:
        raise Misfit(f"the row has {media!r}, which is not carried out: only text is trained")
    messages, first = _conversation(fields, layout)
    tools = _tools(fields.get("tools"))
    return Example(row, messages=messages, tools=tools, completion_from=first)


def _conversation(fields: dict[str, Any], layout: Layout) -> tuple[tuple[Message, ...], int | None]:
    if layout == "messages":
        return _trainable(_messages(fields["messages"])), None
    if layout == "sharegpt":
        return _trainable(_sharegpt(fields)), None
    if layout == "alpaca":
        return _alpaca(fields), None
    if layout == "prompt_answer":
        return (*asked(fields["prompt"]), _answer(fields["answer"])), None
    prompt, completion = _messages(fields["prompt"]), fields["completion"]
    if not isinstance(completion, list):
        raise Misfit("prompt and completion must both be strings, or both lists of messages")
    return _trainable([*prompt, *_messages(completion)]), len(prompt)


def asked(prompt: Any) -> tuple[Message, ...]:
    """A bare prompt as a chat: a string is a user's turn, since chat models are asked through their template.

    Raises Misfit for anything else than a string or a list of messages.
    """
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt:
        return tuple(_messages(prompt))
    raise Misfit("`prompt` must be a string or a list of messages")


def _answer(answer: Any) -> Message:
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and answer != "":
        return {"role": "assistant", "content": str(answer)}
    raise Misfit("'answer' must be a string or a number")


def _plain_pair(row: Row) -> Example:
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(completion, list):
        raise Misfit("prompt and completion must both be strings, or both lists of messages")
    prompt, completion = _text(prompt, "prompt", empty=True), _text(completion, "completion")
    return Example(row, text=prompt + completion, prompt_text=prompt)


def _alpaca(fields: dict[str, Any]) -> tuple[Message, ...]:
    user = _text(fields["instruction"], "instruction")
    if fields.get("input"):
        user = f"{user}\n\n{_text(fields['input'], 'input')}"
    messages: list[Message] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _text(fields["system"], "system")})
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise Misfit("'history' must be a list of [instruction, answer] pairs")
    for instruction, answer in history:
        messages.append({"role": "user", "content": _text(instruction, "history")})
        messages.append({"role": "assistant", "content": _text(answer, "history")})
    messages.append({"role": "user", "content": user})
    messages.append({"role": "assistant", "content": _text(fields["output"], "output")})
    return tuple(messages)


def _sharegpt(fields: dict[str, Any]) -> list[Message]:
    turns = _list(fields["conversations"])
    messages: list[Message] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _text(fields["system"], "system")})
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise Misfit(f"message {number} has no 'from'")
        role = _SHAREGPT_ROLES.get(turn["from"])
        if role is None:
            known = ", ".join(_SHAREGPT_ROLES)
            raise Misfit(f"message {number} has the unknown role {turn['from']!r}; known are {known}")
        _refuse_lost(turn, number)
        text = turn.get("value")
        if not isinstance(text, str):
            raise Misfit(f"message {number} has no text in 'value'")
        messages.append(_called(text, number) if role == "function_call" else {"role": role, "content": text})
    return messages


def _called(text: str, number: int) -> Message:
    """ShareGPT's ``function_call``: JSON of one call, or of several."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise Misfit(f"message {number} is a function call and no JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [_call(call, number) for call in calls]}


def _messages(value: Any) -> list[Message]:
    return [_message(item, number) for number, item in enumerate(_list(value), 1)]


def _list(value: Any) -> list[Any]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # CSV and many Parquet files hold JSON as text
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Misfit(f"the conversation is text that is no JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise Misfit("the conversation must be a list with at least one message")
    return value


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise Misfit(f"message {number} has no 'role'")
    _refuse_lost(item, number)
    message = {key: item[key] for key in _SHOWN if item.get(key) is not None}
    if item.get("tool_calls"):
        calls = item["tool_calls"]
        if not isinstance(calls, list):
            raise Misfit(f"message {number}: 'tool_calls' must be a list")
        message["tool_calls"] = [_call(call, number) for call in calls]
    message["content"] = _content(item.get("content"), number, optional="tool_calls" in message)
    return message


def _refuse_lost(turn: dict[str, Any], number: int) -> None:
    lost = next((key for key in _LOST if turn.get(key)), None)
    if lost is not None:
        raise Misfit(f"message {number} has {lost!r}, which is not carried out: text and `tool_calls` are")
    if turn.get("weight", 1) not in (None, 1) or turn.get("train") is False:
        raise Misfit(f"message {number} is not to be trained: choosing single turns is not carried out")


def _content(content: Any, number: int, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Misfit(f"message {number} holds something else than text, and only text is trained")
        return "".join(map(str, parts))
    if not isinstance(content, str):
        raise Misfit(f"message {number} has no text in 'content'")
    return content


def _call(call: Any, number: int) -> dict[str, Any]:
    """One call in transformers' form: ``{"type": "function", "function": {"name": ..., "arguments": {...}}}``."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Misfit(f"message {number} calls a function without a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise Misfit(f"message {number}: the arguments of {function['name']} are no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise Misfit(f"message {number}: the arguments of {function['name']} must be a JSON object")
    kept = {key: call[key] for key in ("id",) if call.get(key) is not None}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Misfit(f"column 'tools' is text that is no JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Misfit("column 'tools' must be a list of JSON schemas")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    if not all(isinstance(tool["function"], dict) and tool["function"].get("name") for tool in tools):
        raise Misfit("column 'tools' holds a function without a name")
    return tuple(tools)


def _trainable(messages: Sequence[Message]) -> tuple[Message, ...]:
    if not any(message["role"] == "assistant" for message in messages):
        raise Misfit("the conversation has no assistant turn, so there is nothing to train on")
    return tuple(messages)


def _text(value: Any, name: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise Misfit(f"{name!r} must be a string that is not empty")
    return value
