"""Rows of ShareGPT: turns with `from` and `value`."""

from __future__ import annotations

from ftcli.rows.layouts.messages import REASONING_KEYS, call_of, conversation, list_of, marks_of, refuse_unsupported
from ftcli.rows.layouts.prompted import text_of
from ftcli.rows.limits import parse
from ftcli.rows.row import Example, Message, Misfit, Row

_ROLES = {
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


def understand(row: Row) -> Example:
    """``{"conversations": [{"from": "human", "value": ...}, ...], "system": ..., "tools": ...}``."""
    fields = row.fields
    messages: list[Message] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": text_of(fields["system"], "system")})
    turns, first = list_of(fields["conversations"]), len(messages)
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str):
            raise Misfit(f"message {number} has no 'from'")
        role = _ROLES.get(turn["from"])
        if role is None:
            raise Misfit(f"message {number} has the unknown role {turn['from']!r}; known are {', '.join(_ROLES)}")
        refuse_unsupported(turn, number)
        text = turn.get("value")
        if not isinstance(text, str):
            raise Misfit(f"message {number} has no text in 'value'")
        message = _called(text, number) if role == "function_call" else {"role": role, "content": text}
        messages.append({**message, **{key: turn[key] for key in REASONING_KEYS if turn.get(key)}})
    roles = [message["role"] for message in messages[first:]]
    return conversation(row, messages, untrained=marks_of(turns, roles, first))


def _called(text: str, number: int) -> Message:
    """A turn of JSON: one call, or several."""
    try:
        calls = parse(text)
    except ValueError as error:
        raise Misfit(f"message {number} is a function call but not JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [call_of(call, number) for call in calls]}
