"""Rows of labelled answers: a prompt, an answer, and whether the answer is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ftcli.methods.preference import rows as pairs
from ftcli.rows.columns import BAD, GOOD
from ftcli.rows.layouts import meant_for, messages, prompted
from ftcli.rows.layouts.messages import conversation, list_of, marks_of, messages_of
from ftcli.rows.layouts.prompted import pair, text_of
from ftcli.rows.row import Example, Message, Misfit, Row

#: What the label is called, by TRL and ms-swift, and by LLaMA-Factory.
_LABELS = ("label", "kto_tag")


def understand(row: Row) -> Example:
    """``{"prompt": ..., "completion": ..., "label": true}``: strings, or lists of messages. A conversation
    (``messages``, ``conversations``) or an instruction with its output may take their place: what follows the last
    user's turn is the answer. A pair of ``chosen`` and ``rejected`` is one answer of either kind.

    ``value`` is 1 for a wanted answer and -1 for an unwanted one. Raises Misfit without a label or an answer.
    """
    said = {name: row.fields[name] for name in _LABELS if row.fields.get(name) is not None}
    if not said and {"chosen", "rejected"} <= set((both := pairs.renamed(row)).fields):
        wanted = pairs.understand(both)
        return replace(wanted, value=1.0, others=tuple(replace(one, value=-1.0) for one in wanted.others))
    if not said:
        empty = next((name for name in _LABELS if name in row.fields), None)
        raise Misfit(f"{empty!r} says nothing" if empty else f"column 'label' is missing{meant_for(row)}")
    values = {name: _value(name, label) for name, label in said.items()}
    if len(set(values.values())) > 1:
        raise Misfit(f"the columns {' and '.join(map(repr, said))} contradict each other")
    return replace(_answered(row), value=next(iter(values.values())))


def _value(name: str, label: Any) -> float:
    """1 or -1. Raises Misfit for a label that says neither."""
    word = str(label).strip().lower()
    if word not in GOOD | BAD:
        raise Misfit(f"{name!r} is {label!r}; write true for a wanted answer and false for an unwanted one")
    return 1.0 if word in GOOD else -1.0


def _answered(row: Row) -> Example:
    """The row's answer after its prompt."""
    fields = row.fields
    if "completion" in fields:
        return _completed(row, fields.get("prompt"), fields["completion"])
    if "messages" in fields:
        return _last_answer(messages.understand(row))
    if "conversations" in fields:
        return _last_answer(prompted.understand_sharegpt(row))
    if {"instruction", "output"} <= set(fields):
        return prompted.understand_instruction(row)
    raise Misfit("the row has a label and no answer: it needs `prompt` with `completion`, or `messages`")


def _completed(row: Row, prompt: Any, completion: Any) -> Example:
    """``completion`` may hold the whole conversation: without a ``prompt``, or with one that stands in it as well."""
    answer = pairs.listed(completion)
    if pairs.is_text(answer) and pairs.is_text(prompt):
        return pair(row)
    if pairs.is_text(answer) and prompt is None:
        raise Misfit("column 'prompt' is missing")
    if prompt is None or (pairs.is_text(prompt) and any(prompt == m["content"] for m in messages_of(answer))):
        return _last_answer(messages.understand(replace(row, fields={**row.fields, "messages": answer})))
    if pairs.is_text(prompt):
        raise Misfit("prompt and completion must both be strings, or both lists of messages")
    asked = list_of(prompt)
    said = (
        [{"role": "assistant", "content": text_of(answer, "completion")}] if pairs.is_text(answer) else list_of(answer)
    )
    if messages_of(said)[: len(asked)] == messages_of(asked):
        said = said[len(asked) :]
    turns = [*asked, *said]
    chat = messages_of(turns)
    _require_answer(chat[len(asked) :])
    return conversation(row, chat, len(asked), marks_of(turns, [message["role"] for message in chat]))


def _last_answer(example: Example) -> Example:
    """The chat with everything after its last user's turn as the completion."""
    chat = example.messages or ()
    asked = max((n for n, message in enumerate(chat) if message["role"] == "user"), default=-1)
    _require_answer(chat[asked + 1 :])
    first = next(n for n in range(asked + 1, len(chat)) if chat[n]["role"] == "assistant")
    return replace(example, completion_from=first)


def _require_answer(turns: Sequence[Message]) -> None:
    if not pairs.has_answer(turns):
        raise Misfit("there is no answer after the prompt that the label could be of")
