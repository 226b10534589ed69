"""Rows of preference pairs: a prompt with a chosen and a rejected answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ftcli.plain import JsonMap, JsonObject
from ftcli.rows.layouts.messages import conversation, list_of, marks_of, messages_of
from ftcli.rows.layouts.prompted import instructed, shared, shared_beginnings, text_of
from ftcli.rows.row import Example, Message, Misfit, Row


def understand(row: Row) -> Example:
    """``{"prompt": ..., "chosen": ..., "rejected": ...}``: strings, or lists of messages. Without a prompt, or where it
    stands in both answers as well, the messages that both begin with are the prompt; of strings the words.

    The example is the chosen answer's, with the row's `margin`; ``others`` holds the rejected one's. Raises Misfit for
    answers that are empty or equal, and for two that begin with nothing in common where a prompt is missing.
    """
    chosen, rejected = listed(row.fields["chosen"]), listed(row.fields["rejected"])
    if is_text(chosen) != is_text(rejected):
        raise Misfit("chosen and rejected must both be strings, or both lists of messages")
    first, second = _texts(row, chosen, rejected) if is_text(chosen) else _chats(row, chosen, rejected)
    if first.images != second.images:
        raise Misfit("chosen and rejected show other images: only answers to the same prompt can be compared")
    if first.messages is None and any(row.fields.get(name) for name in ("image", "images")):
        raise Misfit("a prompt with images must be a list of messages, which say where each belongs")
    return replace(first, others=(second,), value=_margin(row.fields.get("margin")))


def renamed(row: Row) -> Row:
    """A pair in the columns of LLaMA-Factory, axolotl or ms-swift as ``prompt``, ``chosen`` and ``rejected``: answers
    called `chosen_response` and `rejected_response`; a conversation with another last answer beside it (`messages` with
    `rejected_response` or `rejected_messages`); a prompt in `conversations`, `instruction` or `question`.
    """
    fields = dict(row.fields)
    for name in ("chosen", "rejected"):
        if name not in fields and fields.get(f"{name}_response") is not None:
            fields[name] = fields[f"{name}_response"]
    if "chosen" not in fields and fields.get("messages") is not None:
        said = list_of(fields["messages"])
        if fields.get("rejected_messages") is not None:
            fields |= {"chosen": said, "rejected": fields["rejected_messages"]}
        elif "rejected" in fields:
            fields |= _with_another_end(said, fields["rejected"])
    if {"chosen", "rejected"} <= set(fields) and fields.get("prompt") is None and not _tells_prompt(fields["chosen"]):
        fields |= _prompt_of_others(fields)
    return replace(row, fields=fields)


def _with_another_end(said: list[Any], rejected: Any) -> JsonObject:
    """The prompt and both answers of a conversation and what might have been its last answer."""
    if messages_of(said)[-1]["role"] != "assistant":
        raise Misfit("'messages' ends without an answer that the rejected one could be compared with")
    other = {"role": "assistant", "content": rejected} if is_text(rejected) else rejected
    return {"prompt": said[:-1], "chosen": said[-1:], "rejected": listed(other)}


def _tells_prompt(answer: Any) -> bool:
    """True if an answer is a whole conversation, whatever other columns say of its prompt."""
    turns = list_of(answer) if answer and not is_text(answer) and not isinstance(answer, dict) else [None]
    first = turns[0] if isinstance(turns[0], dict) else {}
    return first.get("role", first.get("from")) in ("user", "human", "system")


def _prompt_of_others(fields: JsonMap) -> JsonObject:
    """The prompt that stands in another column, and answers as messages where they are turns of `from` and `value`."""
    if fields.get("conversations") is not None:
        system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
        found: JsonObject = {"prompt": [*system, *shared(list_of(fields["conversations"]))]}
        for name in ("chosen", "rejected"):
            turns = listed(fields[name])
            if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]:
                found[name] = shared(turns)
        return found
    if (asked := fields.get("instruction") or fields.get("question")) is not None:
        return {"prompt": instructed({**fields, "instruction": asked})}
    return {}


def _margin(given: Any) -> float:
    """By how much the chosen answer is the better one; 0 where the row does not say."""
    if given is None or given == "":
        return 0.0
    try:
        margin = float(given)
    except (TypeError, ValueError):
        margin = math.nan
    if isinstance(given, bool) or not math.isfinite(margin):
        raise Misfit("margin must be a finite number")
    return margin


def listed(turns: Any) -> Any:
    """A message alone, as some datasets hold prompts and answers, as a list of it."""
    return [turns] if isinstance(turns, dict) and turns else turns


def is_text(value: Any) -> bool:
    """True for plain text; messages are text, too, in tables."""
    return isinstance(value, str) and not value.lstrip().startswith("[{")


def _texts(row: Row, chosen: Any, rejected: Any) -> tuple[Example, Example]:
    prompt = listed(row.fields.get("prompt"))
    answers = text_of(chosen, "chosen"), text_of(rejected, "rejected")
    if answers[0] == answers[1]:
        raise Misfit("chosen and rejected are the same, so there is nothing to prefer")
    if prompt is None:
        asked = implicit_prompt(*answers)
        first, second = (Example(row, text=text, prompt_text=asked, implicit=True) for text in answers)
        return first, second
    if is_text(prompt):
        first, second = (Example(row, text=prompt + text, prompt_text=prompt) for text in answers)
        return first, second
    turns = messages_of(prompt)
    first, second = (
        conversation(row, [*turns, {"role": "assistant", "content": text}], len(turns)) for text in answers
    )
    return first, second


def implicit_prompt(chosen: str, rejected: str) -> str:
    """The whole words that two texts begin with. Raises Misfit where nothing says what is asked, or answered."""
    asked = chosen[: next(iter(shared_beginnings(chosen, rejected)), 0)]
    if not asked.strip():
        raise Misfit(
            "chosen and rejected begin with no word in common that could be their prompt: write it as `prompt`"
        )
    for part, whole, text in (("chosen", "rejected", chosen), ("rejected", "chosen", rejected)):
        if not text[len(asked) :].strip():
            raise Misfit(
                f"{whole} begins with all of {part}, which leaves {part} no answer: write the prompt as `prompt`"
            )
    return asked


def _chats(row: Row, chosen: Any, rejected: Any) -> tuple[Example, Example]:
    given = listed(row.fields.get("prompt"))
    stated = list_of(given) if given and not is_text(given) else []
    turns = list_of(chosen), list_of(rejected)
    if stated and any(messages_of(answer)[: len(stated)] != messages_of(stated) for answer in turns):
        turns = [*stated, *turns[0]], [*stated, *turns[1]]
    messages = messages_of(turns[0]), messages_of(turns[1])
    if messages[0] == messages[1]:
        raise Misfit("chosen and rejected are the same, so there is nothing to prefer")
    prompt = len(stated) or _shared(*messages)
    if not prompt:
        raise Misfit("chosen and rejected begin with different messages: they answer different prompts")
    if is_text(given) and given and all(given != m["content"] for m in messages[0][:prompt]):
        raise Misfit("`prompt` is not among the messages that chosen and rejected begin with")
    first, second = (
        _answer(row, name, all_turns, understood, prompt)
        for name, all_turns, understood in zip(("chosen", "rejected"), turns, messages, strict=True)
    )
    return first, second


def _answer(row: Row, name: str, turns: list[Any], messages: list[Message], prompt: int) -> Example:
    if not has_answer(messages[prompt:]):
        raise Misfit(f"{name} has no answer after the prompt")
    untrained = marks_of(turns, [message["role"] for message in messages])
    return conversation(row, messages, completion_from=prompt, untrained=untrained)


def has_answer(messages: Sequence[Message]) -> bool:
    """True if an assistant says or calls something."""
    return any(m["role"] == "assistant" and (m["content"] or m.get("tool_calls")) for m in messages)


def _shared(chosen: list[Message], rejected: list[Message]) -> int:
    """How many messages both begin with; each keeps at least one of its own."""
    most = min(len(chosen), len(rejected)) - 1
    count = 0
    while count < most and chosen[count] == rejected[count]:
        count += 1
    return count
