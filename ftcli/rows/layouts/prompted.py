"""Rows of a prompt with a completion or an answer, and bare prompts."""

from __future__ import annotations

from typing import Any

from ftcli.rows.layouts.marks import marks_of
from ftcli.rows.layouts.messages import conversation, list_of, messages_of
from ftcli.rows.layouts.plain import pair
from ftcli.rows.row import Example, Message, Misfit, Row
from ftcli.tables import layouts


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
