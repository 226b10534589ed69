"""Rows of other forms than messages: plain text, a prompt with its answer, an instruction with its output, bare
prompts, turns of ShareGPT with `from` and `value`, and rows that are tokenized already, as trainers write them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Any

from ftcli.labels import IGNORE_INDEX
from ftcli.plain import JsonMap
from ftcli.rows.layouts.messages import (
    REASONING_KEYS,
    call_of,
    conversation,
    list_of,
    marks_of,
    messages_of,
    parsed,
    refuse_unsupported,
)
from ftcli.rows.row import Example, Message, Misfit, Row
from ftcli.tables import layouts

#: A letter or digit of a script that parts words; each one of the others (Chinese, Japanese) is a piece of its own.
_LETTER = r"[^\W\u2e80-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff][\u0300-\u036f]*"
#: A word or number (`don't`, `3.14`), or any other character.
_PIECE = re.compile(rf"(?:{_LETTER})+(?:[.,'\u2019](?:{_LETTER})+)*|.", re.DOTALL)


def understand_text(row: Row) -> Example:
    """``{"text": "..."}``."""
    return Example(row, text=text_of(row.fields["text"], "text"))


def pair(row: Row) -> Example:
    """``{"prompt": "...", "completion": "..."}``; the prompt may be empty."""
    prompt = text_of(row.fields["prompt"], "prompt", empty=True)
    return Example(row, text=prompt + text_of(row.fields["completion"], "completion"), prompt_text=prompt)


def shared_beginnings(one: str, other: str) -> list[int]:
    """Places where the beginning that two texts share may end, from the longest on: after a whole word, and first of
    all, as in TRL, before a space that follows it.
    """
    pieces = zip(_PIECE.findall(one), _PIECE.findall(other), strict=False)
    ends = list(accumulate(len(piece) for piece, _ in takewhile(lambda both: both[0] == both[1], pieces)))
    return [place for end in reversed(ends) for place in ((end - 1, end) if one[end - 1] == " " else (end,))]


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
    messages = instructed(row.fields)
    messages.append({"role": "assistant", "content": text_of(row.fields["output"], "output")})
    return conversation(row, messages)


def instructed(fields: JsonMap) -> list[Message]:
    """The turns in front of an answer: system, history, and the instruction with its input. Raises Misfit."""
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
    return messages


def understand_tokenized(row: Row) -> Example:
    """``{"input_ids": [...], "labels": [...], "attention_mask": ..., "position_ids": ...}``.

    A label is the id at its own place, or -100 for no loss: the loss shifts them, as transformers does. Padding (0 in
    ``attention_mask``) is taken away.
    """
    ids, labels = _ints(row, "input_ids"), _ints(row, "labels")
    if len(ids) != len(labels):
        raise Misfit(f"'input_ids' has {len(ids)} values and 'labels' {len(labels)}")
    wrong = next((n for n, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[n])), None)
    if wrong is not None:
        if labels[:-1] == ids[1:] or all(b in (IGNORE_INDEX, a) for a, b in zip(ids[1:], labels[:-1], strict=True)):
            raise Misfit("'labels' are shifted by one: give each token's own id, and the loss shifts them")
        raise Misfit(f"label {wrong + 1} is {labels[wrong]}, neither -100 nor the id {ids[wrong]} at its place")
    real = _real(row, ids, labels)
    positions = _ints(row, "position_ids") if row.fields.get("position_ids") is not None else None
    if positions is not None and [p for p, keep in zip(positions, real, strict=False) if keep] != list(
        range(sum(real))
    ):
        raise Misfit("'position_ids' begin anew inside of the row: give one document a row, and set data.packing")
    kept = [(i, label) for i, label, keep in zip(ids, labels, real, strict=True) if keep]
    if not kept:
        raise Misfit("'input_ids' is empty")
    return Example(row, input_ids=tuple(i for i, _ in kept), labels=tuple(label for _, label in kept))


def _real(row: Row, ids: list[int], labels: list[int]) -> list[bool]:
    """True for each position that is no padding."""
    if row.fields.get("attention_mask") is None:
        return [True] * len(ids)
    mask = _ints(row, "attention_mask")
    if len(mask) != len(ids) or any(value not in (0, 1) for value in mask):
        raise Misfit("'attention_mask' must have a 0 or a 1 for each token")
    inside = mask[mask.index(1) : len(mask) - mask[::-1].index(1)] if 1 in mask else []
    if 0 in inside:
        raise Misfit("'attention_mask' hides tokens between others, which is not supported")
    if any(label != IGNORE_INDEX for label, value in zip(labels, mask, strict=True) if not value):
        raise Misfit("'labels' train a token that 'attention_mask' hides")
    return [value == 1 for value in mask]


def _ints(row: Row, name: str) -> list[int]:
    value: Any = row.fields[name]
    if isinstance(value, str):  # CSV
        value = parsed(value, f"{name!r} is text that is not JSON")
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise Misfit(f"{name!r} must be a list of whole numbers")
    return value


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


def understand_sharegpt(row: Row) -> Example:
    """``{"conversations": [{"from": "human", "value": ...}, ...], "system": ..., "tools": ...}``."""
    messages: list[Message] = []
    if row.fields.get("system"):
        messages.append({"role": "system", "content": text_of(row.fields["system"], "system")})
    turns, first = list_of(row.fields["conversations"]), len(messages)
    messages += shared(turns)
    roles = [message["role"] for message in messages[first:]]
    return conversation(row, messages, untrained=marks_of(turns, roles, first))


def shared(turns: Sequence[Any]) -> list[Message]:
    """Turns of `from` and `value` as messages. Raises Misfit."""
    messages: list[Message] = []
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
    return messages


def _called(text: str, number: int) -> Message:
    """A turn of JSON: one call, or several."""
    calls = parsed(text, f"message {number} is a function call but not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "tool_calls": [call_of(call, number) for call in calls]}
