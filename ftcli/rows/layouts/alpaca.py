"""Rows of an instruction and its output, with optional input, system text and history."""

from __future__ import annotations

from ftcli.rows.layouts.messages import conversation
from ftcli.rows.layouts.plain import text_of
from ftcli.rows.row import Example, Message, Misfit, Row


def understand(row: Row) -> Example:
    """``{"instruction": ..., "input": ..., "output": ..., "system": ..., "history": [[instruction, answer], ...]}``."""
    fields = row.fields
    user = text_of(fields["instruction"], "instruction")
    if fields.get("input"):
        user = f"{user}\n\n{text_of(fields['input'], 'input')}"
    messages: list[Message] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": text_of(fields["system"], "system")})
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turns, list) and len(turns) == 2 for turns in history):
        raise Misfit("'history' must be a list of [instruction, answer] pairs")
    for instruction, answer in history:
        messages.append({"role": "user", "content": text_of(instruction, "history")})
        messages.append({"role": "assistant", "content": text_of(answer, "history")})
    messages.append({"role": "user", "content": user})
    messages.append({"role": "assistant", "content": text_of(fields["output"], "output")})
    return conversation(row, messages)
