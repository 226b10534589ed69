"""Rows of plain text, of a prompt with its answer, of an instruction with its output, and bare prompts."""

from __future__ import annotations

from typing import Any

from ftcli.rows.layouts.messages import conversation, list_of, marks_of, messages_of
from ftcli.rows.row import Example, Message, Misfit, Row
from ftcli.tables import layouts


def understand_text(row: Row) -> Example:
    """``{"text": "..."}``."""
    return Example(row, text=text_of(row.fields["text"], "text"))


def pair(row: Row) -> Example:
    """``{"prompt": "...", "completion": "..."}``; the prompt may be empty."""
    prompt = text_of(row.fields["prompt"], "prompt", empty=True)
    return Example(row, text=prompt + text_of(row.fields["completion"], "completion"), prompt_text=prompt)


def text_of(value: Any, name: str, *, empty: bool = False) -> str:
    """``value`` as text. Raises Misfit, which names the column, for anything else and unless ``empty`` for no text."""
    if not isinstance(value, str) or not (value or empty):
        raise Misfit(f"{name!r} must be a string that is not empty")
    return value


def understand_completion(row: Row) -> Example:
    """``{"prompt": ..., "completion": ...}``, both strings or both lists of messages."""
    prompt, completion = row.fields["prompt"], row.fields["completion"]
    if isinstance(prompt, list) != isinstance(completion, list):
        raise Misfit("prompt and completion must both be strings, or both lists of messages")
    if not isinstance(prompt, list):
        return pair(row)
    turns = [*list_of(prompt), *list_of(completion)]
    messages = messages_of(turns)
    untrained = marks_of(turns, [message["role"] for message in messages])
    return conversation(row, messages, completion_from=len(prompt), untrained=untrained)


def understand_answer(row: Row) -> Example:
    """``{"prompt": ..., "answer": ...}``: a question, or messages, and a string or number."""
    return conversation(row, [*as_chat(row.fields["prompt"]), _answer(row.fields["answer"])])


def is_bare(row: Row, requested: str) -> bool:
    """True if a row that is to be answered is a prompt alone: under `auto`, nothing beside it could be the answer."""
    answers = {name for layout in layouts.TABLE.values() if "prompt" in layout.columns for name in layout.columns}
    return requested == "auto" and (answers & set(row.fields)) == {"prompt"}


def as_chat(prompt: Any) -> tuple[Message, ...]:
    """A bare prompt as a chat: a string is a user's turn, since chat models are asked through their template.

    Raises Misfit for anything else than a string or a list of messages.
    """
    if isinstance(prompt, str) and prompt:
        return ({"role": "user", "content": prompt},)
    if isinstance(prompt, list) and prompt:
        return tuple(messages_of(prompt))
    raise Misfit("`prompt` must be a string or a list of messages")


def _answer(answer: Any) -> Message:
    if isinstance(answer, str | int | float) and not isinstance(answer, bool) and answer != "":
        return {"role": "assistant", "content": str(answer)}
    raise Misfit("'answer' must be a string or a number")


def understand_instruction(row: Row) -> Example:
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
